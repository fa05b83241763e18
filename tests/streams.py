"""Streams as vLLM sends them, and how tests play them through a reader."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ctxgate.inference.chat_stream import StreamReader

if TYPE_CHECKING:
    from ctxgate.inference.usage import Usage

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
FINGERPRINT = "vllm-0.32.0-1a2b3c4d"


def event(**members: Any) -> bytes:
    """A chunk with vLLM's members in vLLM's order and compact form."""
    record = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m", **members}
    return b"data: " + json.dumps(record, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


def choice(finish: str | None = None, index: int = 0, **delta: Any) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}


def content(text: str, **members: Any) -> bytes:
    return event(choices=[choice(content=text)], **members)


def usage(prompt: int, output: int, **details: int) -> dict[str, Any]:
    record: dict[str, Any] = {
        "prompt_tokens": prompt,
        "total_tokens": prompt + output,
        "completion_tokens": output,
    }
    return {**record, "prompt_tokens_details": details} if details else record


def play(events: list[bytes], reader: StreamReader | None = None) -> tuple[StreamReader, list[bytes]]:
    reader = reader or StreamReader()
    return reader, [out for e in events if (out := reader.on_event(e)) is not None]


def metered(reader: StreamReader) -> Usage:
    parsed = reader.usage()
    assert parsed.usage is not None, parsed.anomalies
    return parsed.usage


ROLE = event(choices=[choice(role="assistant", content="")])
FINISH = event(choices=[choice("stop", content="")])
TALK = [ROLE, content("Hello"), content(" wörld")]
USAGE = event(choices=[], usage=usage(96, 3, cached_tokens=64), system_fingerprint=FINGERPRINT)
