"""Requests whose misses are explained, and an engine that reports what it is told to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from support.behaviours import plays
from support.gateway import MODEL

if TYPE_CHECKING:
    from ctxgate.gateway.miss import Miss
    from support.client import Answer
    from support.gateway import Gateway
    from support.upstream import Behaviour, Exchange, Upstream

LONG: Final = "The quick brown fox jumps over the lazy dog and runs far away. " * 40


def turn(number: int, *, system: str = "Be brief.", **members: Any) -> dict[str, Any]:
    """A request with `number` exchanges behind its first question."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": LONG}]
    for at in range(number):
        messages += [
            {"role": "assistant", "content": f"Answer {at}."},
            {"role": "user", "content": f"And {at}?"},
        ]
    return {"model": MODEL, "messages": messages, "max_tokens": 2, **members}


def answers(prompt: int, cached: int | None) -> Behaviour:
    """An engine that reports these figures."""

    def write(exchange: Exchange) -> None:
        if exchange.streams:
            exchange.head()
            exchange.text("a ")
            exchange.chunk({}, "stop")
            exchange.usage_chunk(prompt=prompt, cached=cached, completion=1)
            exchange.done()
        else:
            exchange.answer(prompt=prompt, cached=cached, completion=1)

    return plays(write)


def told(answer: Answer) -> tuple[str, str]:
    """The two headers."""
    assert answer.status == 200
    return answer.header("x-ctxgate-expected-cached"), answer.header("x-ctxgate-miss")


async def send(gateway: Gateway, upstream: Upstream, body: dict[str, Any], *figures: int | None) -> Answer:
    """One request, answered with these figures: the prompt's tokens, and the cached ones among them."""
    prompt, cached = figures
    upstream.script.append(answers(prompt or 0, cached))
    return await gateway.post(body)


async def booked(gateway: Gateway) -> list[Miss | None]:
    """The misses of the ledger's rows, in order."""
    return [row.settled.miss for row in await gateway.rows()]
