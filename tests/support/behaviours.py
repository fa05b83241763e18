"""What a scripted upstream may do with a request: errors, deaths, silence, and calls that are aborted."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from support.upstream import Exchange

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.upstream import Behaviour


def plays(write: Callable[[Exchange], None]) -> Behaviour:
    """A behaviour that writes at once."""

    async def behaviour(exchange: Exchange) -> None:
        write(exchange)

    return behaviour


def refuses(status: int, body: bytes | dict[str, Any], content_type: str = "application/json") -> Behaviour:
    """A behaviour that answers with an error."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return plays(lambda exchange: exchange.respond(status, raw, content_type))


def vllm_error(message: str, kind: str, code: int, param: str | None = None) -> dict[str, Any]:
    """vLLM's error envelope."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


BUSY: Final = refuses(
    503,
    vllm_error("The engine is currently busy and cannot accept new requests.", "Service Unavailable", 503),
)
RESET: Final = plays(Exchange.reset)


def dies_after(count: int, how: str) -> Behaviour:
    """A stream of `count` texts that ends by "reset", "hang_up" or a clean "end" without its marker."""

    def write(exchange: Exchange) -> None:
        exchange.head()
        exchange.chunk({"role": "assistant", "content": ""})
        for number in range(count):
            exchange.text(f"t{number} ")
        getattr(exchange, how)()

    async def behaviour(exchange: Exchange) -> None:
        write(exchange)

    return behaviour


async def until_aborted(exchange: Exchange) -> None:
    """Silent until the gateway leaves; an aborted call then ends as vLLM's do while they wait."""
    await exchange.until_left()
    if not exchange.aborted.is_set():
        return
    if exchange.streams:
        exchange.head()
        exchange.chunk({"role": "assistant", "content": ""})
        exchange.end_aborted(completion=0, cached=0)
    else:
        exchange.answer("abort", "", completion=0, cached=0)


def streams_until_aborted(*texts: str) -> Behaviour:
    """Some text, then silence until the call is aborted, then its usage."""

    async def behaviour(exchange: Exchange) -> None:
        exchange.head()
        exchange.chunk({"role": "assistant", "content": ""})
        for text in texts:
            exchange.text(text)
        await exchange.until_left()
        if exchange.aborted.is_set():
            with suppress(RuntimeError):
                exchange.end_aborted(completion=len(texts) + 2)

    return behaviour
