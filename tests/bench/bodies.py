"""Chat requests as a coding agent sends them: a system prompt, tools, many rounds of calls and results."""

from __future__ import annotations

import json
import random
from enum import StrEnum
from typing import Any, Final

CLIENT_MARK: Final = "%CLIENT--NONCE-%"  # the load generator writes 16 characters of the connection here
CONVERSATION_MARK: Final = "%CONVERSE-NONCE%"  # ... here of the connection's present conversation
REQUEST_MARK: Final = "%REQUEST-NONCE-%"  # ... and here of the request
TURN_MARK: Final = "%END-OF-A-TURN-%"  # a turn's messages end here; not sent
MODEL: Final = "mock"
BYTES_PER_MESSAGE: Final = 3170  # four megabytes are about 1,160 messages
BYTES_PER_ROUND: Final = 6_900  # what a call and its result come to with that
SHORT: Final = 10_000  # bytes; a shorter conversation is played from its first message on
SHORT_TURNS: Final = 7  # 0 to 6 rounds, 3 on average
LONG_TURNS: Final = 16

_OPENING: Final = b'{"messages":['
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


class Traffic(StrEnum):
    """How the requests of a connection are related."""

    GROWING = "growing"  # an agent's: each extends the one before by a round, then a conversation starts anew
    SIBLINGS = "siblings"  # each is a branch of the one before, with other last two messages
    REWRITTEN = "rewritten"  # each repeats system prompt and task; all that follows is new
    NEW = "new"  # each is a conversation of its own under the same system prompt


def template(size: int, traffic: Traffic, *, stream: bool) -> bytes:
    """What the load generator makes all bodies of a row from: chat requests of `size` bytes on average.

    It is one body with marks. A mark of the turn ends the messages of a turn, whose body is all before
    that mark and all after the last one. Without such marks the text is the body of every request.
    """
    if traffic is Traffic.GROWING:
        return growing_body(size, stream=stream)
    return chat_body(size, stream=stream, traffic=traffic)


def growing_body(size: int, *, stream: bool) -> bytes:
    """The template of conversations whose turns are of `size` bytes on average.

    A short conversation starts with system prompt and task, and all its messages but the system prompt
    are new in the connection's next one. A long one starts in its midst: what comes before the first
    turn's round is the same for all conversations of the connection, which fork there.
    """
    rng = random.Random(size)
    short = size < SHORT
    rest: dict[str, Any] = {"model": MODEL, "max_tokens": 4096, "temperature": 0.2}
    rest["tools"] = _tools(rng, 2 if short else 12)
    if stream:
        rest["stream"] = True
    per_message = min(BYTES_PER_MESSAGE, size // 12)
    head = _head(rng, per_message, CONVERSATION_MARK if short else CLIENT_MARK)
    messages = [_encode(message) for message in head]
    tail = b"]," + _encode(rest)[1:]
    fixed = len(_OPENING) + len(b",".join(messages)) + len(tail)
    rounds = SHORT_TURNS - 1 if short else LONG_TURNS  # beyond the base, in the last turn
    average = rounds / 2 if short else (rounds + 1) / 2  # of all turns
    base = 0 if short else round((size - fixed) / BYTES_PER_ROUND - average)
    per_round = round((size - fixed) / (base + average))
    for number in range(base):
        messages += _round(rng, number, per_round, CLIENT_MARK)
    if short:
        messages[-1] += TURN_MARK.encode()
    for number in range(rounds):
        call, result = _round(rng, base + number, per_round, CONVERSATION_MARK)
        messages += [call, result + TURN_MARK.encode()]
    return _OPENING + b",".join(messages) + tail


def chat_body(size: int, *, stream: bool, traffic: Traffic = Traffic.SIBLINGS) -> bytes:
    """A chat request of about `size` bytes as JSON, one for all requests; not for growing conversations.

    The first user message carries the mark of the connection (one conversation per client) and the
    last two messages the mark of the request, so consecutive requests of a client share all but those
    two. In traffic that is rewritten all messages after that first one carry the mark of the request, in
    new traffic it does as well.
    """
    request = chat_request(size, 2 if size < SHORT else 12, traffic)
    return _encode(request | {"stream": True} if stream else request)


def chat_request(size: int, tools: int, traffic: Traffic = Traffic.SIBLINGS) -> dict[str, Any]:
    """The request of `chat_body` with so many tools, not streamed."""
    rng = random.Random(size)
    request: dict[str, Any] = {"messages": [], "model": MODEL, "max_tokens": 4096, "temperature": 0.2}
    request["tools"] = _tools(rng, tools)
    per_message = min(BYTES_PER_MESSAGE, size // 12)
    messages: list[dict[str, Any]] = request["messages"]
    messages += _head(rng, per_message, REQUEST_MARK if traffic is Traffic.NEW else CLIENT_MARK)
    mark = "" if traffic is Traffic.SIBLINGS else REQUEST_MARK
    written = len(_encode(request))
    while written < size - 2 * per_message or len(messages) % 2:
        added = _message(rng, len(messages), per_message, mark)
        written += len(_encode(added)) + 2
        messages.append(added)
    for _ in range(2):
        messages.append(_message(rng, len(messages), per_message, REQUEST_MARK))
    return request


def _head(rng: random.Random, size: int, mark: str) -> list[dict[str, Any]]:
    """The system prompt and the task."""
    return [
        {"role": "system", "content": _text(rng, size)},
        {"role": "user", "content": f"Task {mark}: " + _text(rng, size // 2)},
    ]


def _round(rng: random.Random, number: int, size: int, mark: str) -> tuple[bytes, bytes]:
    """A call and its result as JSON, `size` bytes with the commas before them, with ids of their own."""
    call = _message(rng, 2 * number, size // 2, mark)
    result: dict[str, Any] = {"role": "tool", "tool_call_id": f"call_{mark}{number:04d}", "content": mark}
    call["tool_calls"][0]["id"] = result["tool_call_id"]
    left = size - len(_encode(call)) - len(_encode(result)) - 2
    text = _text(rng, left)
    while (excess := len(_encode(text)) - 2 - left) > 0:  # quotes and line ends take two bytes each
        text = text[:-excess]
    result["content"] += text
    return _encode(call), _encode(result)


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


def _encode(value: dict[str, Any] | str) -> bytes:
    """As httpx-based clients write it: compact separators, UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
