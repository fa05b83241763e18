"""Chat requests as a coding agent sends them: a system prompt, tools, many rounds of calls and results."""

from __future__ import annotations

import json
import random
from typing import Any, Final

CLIENT_MARK: Final = "%CLIENT--NONCE-%"  # the load generator writes 16 characters of the connection here
REQUEST_MARK: Final = "%REQUEST-NONCE-%"  # ... and here of the request
MODEL: Final = "mock"
BYTES_PER_MESSAGE: Final = 3170  # four megabytes are about 1,160 messages

_VOCABULARY: Final = """
return self value index parse token buffer length offset config request response stream error handler
async await import class raise yield table column row query commit branch merge test assert expected
actual result list dict None True False lambda filter reduce path open read write
"""
_WORDS: Final = tuple(_VOCABULARY.split())
_LINES: Final = (
    "    def {a}_{b}(self, {c}: int) -> str:",
    '        return f"{a} {{self.{b}}}" + "\\t{c}"',
    "        if {a}.{b} is None or not {c}:",
    "{a}/{b}.py:{n}: error: {c} has no attribute '{a}'",
    "+    {a} = {b}({c}, {n})",
    "-    {a} = {b}[{n}]",
    '{{"{a}": {n}, "{b}": ["{c}", null]}}',
    "The {a} keeps its {b} until the {c} is done; see line {n}.",
)


def chat_body(size: int, *, stream: bool, all_new: bool = False) -> bytes:
    """A chat request of about `size` bytes as JSON.

    The first user message carries the mark of the connection (one conversation per client) and the
    last two messages the mark of the request, so consecutive requests of a client share all but those
    two. With `all_new` every message carries the mark of the request.
    """
    request = chat_request(size, 2 if size < 10_000 else 12, all_new=all_new)
    return _encode(request | {"stream": True} if stream else request)


def chat_request(size: int, tools: int, *, all_new: bool = False) -> dict[str, Any]:
    """The request of `chat_body` with so many tools, not streamed."""
    rng = random.Random(size)
    request: dict[str, Any] = {"messages": [], "model": MODEL, "max_tokens": 4096, "temperature": 0.2}
    request["tools"] = _tools(rng, tools)
    per_message = min(BYTES_PER_MESSAGE, size // 12)
    messages: list[dict[str, Any]] = request["messages"]
    messages += [
        {"role": "system", "content": _text(rng, per_message)},
        {"role": "user", "content": f"Task {CLIENT_MARK}: " + _text(rng, per_message // 2)},
    ]
    written = len(_encode(request))
    while written < size - 2 * per_message or len(messages) % 2:
        added = _message(rng, len(messages), per_message, REQUEST_MARK if all_new else "")
        written += len(_encode(added)) + 2
        messages.append(added)
    for _ in range(2):
        messages.append(_message(rng, len(messages), per_message, REQUEST_MARK))
    return request


def _message(rng: random.Random, index: int, size: int, mark: str) -> dict[str, Any]:
    """Assistant calls at even places, their results at odd ones."""
    if index % 2 == 0:
        path = f"src/{rng.choice(_WORDS)}.py"
        arguments = json.dumps({"path": path, "limit": rng.randrange(2000), "note": mark})
        function = {"name": "tool_0", "arguments": arguments}
        call = {"id": f"call_{index:08d}", "type": "function", "function": function}
        return {"role": "assistant", "content": _text(rng, size // 4), "tool_calls": [call]}
    content = mark + _text(rng, size * 7 // 4)
    return {"role": "tool", "tool_call_id": f"call_{index - 1:08d}", "content": content}


def _tools(rng: random.Random, count: int) -> list[dict[str, Any]]:
    def tool(number: int) -> dict[str, Any]:
        properties = {
            "path": {"type": "string", "description": _text(rng, 60)},
            "limit": {"type": "integer", "minimum": 0},
            "note": {"type": "string"},
        }
        schema = {"type": "object", "properties": properties, "required": ["path"]}
        function = {"name": f"tool_{number}", "description": _text(rng, 120), "parameters": schema}
        return {"type": "function", "function": function}

    return [tool(number) for number in range(count)]


def _text(rng: random.Random, size: int) -> str:
    lines: list[str] = []
    written = 0
    while written < size:
        a, b, c = rng.choices(_WORDS, k=3)
        lines.append(rng.choice(_LINES).format(a=a, b=b, c=c, n=rng.randrange(10_000)))
        written += len(lines[-1]) + 1
    return "\n".join(lines)[:size]


def _encode(value: dict[str, Any]) -> bytes:
    """As httpx-based clients write it: compact separators, UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
