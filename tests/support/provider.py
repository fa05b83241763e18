"""A hosted provider for tests: speaks OpenAI's chat wire, Anthropic's messages wire and Gemini's errors.

Each request takes the next of the `plans` that were queued, else `Plan()`; what it got is in `calls`.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

OPENAI_USAGE = {
    "prompt_tokens": 120,
    "completion_tokens": 5,
    "total_tokens": 125,
    "prompt_tokens_details": {"cached_tokens": 64},
    "completion_tokens_details": {"reasoning_tokens": 2},
}
ANTHROPIC_USAGE = {
    "input_tokens": 30,
    "cache_read_input_tokens": 80,
    "cache_creation_input_tokens": 10,
    "output_tokens": 5,
}


@dataclass(frozen=True)
class Plan:
    """How to answer one call. `usage` None: none is told; `cut`: hang up after the text; `hold`: no end."""

    text: tuple[str, ...] = ("Good ", "day")
    usage: dict[str, Any] | None = field(default_factory=lambda: dict(OPENAI_USAGE))
    status: int = 200
    error: str = ""
    reason: str = ""
    cut: bool = False
    hold: bool = False


@dataclass
class Call:
    """A call as it came."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    gone: asyncio.Event = field(default_factory=asyncio.Event)


class FakeProvider:
    """The server; `async with` runs it."""

    def __init__(self) -> None:
        self.plans: list[Plan] = []
        self.calls: list[Call] = []
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> FakeProvider:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()

    @property
    def url(self) -> str:
        """The root."""
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the caller left
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines[1:])
            if name
        }
        body = json.loads(await reader.readexactly(int(headers.get("content-length", "0"))))
        call = Call(lines[0].split()[1], headers, body)
        self.calls.append(call)
        plan = self.plans.pop(0) if self.plans else Plan()
        anthropic = call.path.endswith("/messages")
        if ":" in call.path:  # Gemini's wire; errors alone are spoken
            error = {"code": plan.status, "message": plan.error, "details": [{"reason": plan.reason}]}
            _head(writer, plan.status, "application/json", json.dumps({"error": error}).encode())
        elif plan.status != 200:
            kind = {"type": "error"} if anthropic else {}
            error = {"message": plan.error, "type": "invalid_request_error", "param": None, "code": None}
            _head(writer, plan.status, "application/json", json.dumps(kind | {"error": error}).encode())
        elif body.get("stream"):
            _head(writer, 200, "text/event-stream", None)
            async for event in _anthropic_events(plan) if anthropic else _openai_events(plan):
                _chunk(writer, event)
                await writer.drain()
            if plan.hold:
                await reader.read()
                call.gone.set()
                return
            if plan.cut:
                writer.transport.abort()
                return
            writer.write(b"0\r\n\r\n")
        else:
            document = _anthropic_whole(plan) if anthropic else _openai_whole(plan)
            _head(writer, 200, "application/json", json.dumps(document).encode())
        await writer.drain()


def _head(writer: asyncio.StreamWriter, status: int, kind: str, body: bytes | None) -> None:
    size = "transfer-encoding: chunked" if body is None else f"content-length: {len(body)}"
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\n{size}\r\nconnection: close\r\n\r\n"
    writer.write(head.encode() + (body or b""))


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


def _openai_whole(plan: Plan) -> dict[str, Any]:
    message = {"role": "assistant", "content": "".join(plan.text), "refusal": None}
    found: dict[str, Any] = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "gpt-4o-mini-2024-07-18",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}],
    }
    return found if plan.usage is None else found | {"usage": plan.usage}


async def _openai_events(plan: Plan) -> AsyncIterator[bytes]:
    def event(delta: dict[str, Any], reason: str | None = None, **more: Any) -> bytes:
        chunk = {
            "id": "chatcmpl-1",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": "gpt-4o-mini-2024-07-18",
            "choices": [{"index": 0, "delta": delta, "finish_reason": reason}],
        }
        return b"data: " + json.dumps(chunk | more).encode() + b"\n\n"

    yield event({"role": "assistant", "content": ""})
    for piece in plan.text:
        yield event({"content": piece})
    if plan.cut or plan.hold:
        return
    yield event({}, "stop")
    if plan.usage is not None:
        yield event({}, choices=[], usage=plan.usage)
    yield b"data: [DONE]\n\n"


def _anthropic_whole(plan: Plan) -> dict[str, Any]:
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "claude-sonnet-4-5",
        "content": [{"type": "text", "text": "".join(plan.text)}],
        "stop_reason": "end_turn",
        "usage": ANTHROPIC_USAGE,
    }


async def _anthropic_events(plan: Plan) -> AsyncIterator[bytes]:
    def event(kind: str, **more: Any) -> bytes:
        return f"event: {kind}\ndata: {json.dumps({'type': kind} | more)}\n\n".encode()

    message = _anthropic_whole(plan) | {"content": [], "usage": ANTHROPIC_USAGE | {"output_tokens": 1}}
    yield event("message_start", message=message)
    yield event("content_block_start", index=0, content_block={"type": "text", "text": ""})
    for piece in plan.text:
        yield event("content_block_delta", index=0, delta={"type": "text_delta", "text": piece})
    if plan.cut or plan.hold:
        return
    yield event("content_block_stop", index=0)
    yield event(
        "message_delta",
        delta={"stop_reason": "end_turn", "stop_sequence": None},
        usage={"output_tokens": ANTHROPIC_USAGE["output_tokens"]},
    )
    yield event("message_stop")
