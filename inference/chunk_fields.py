"""The few members of an answer that metering reads, from a chunk or from a whole answer.

The typed decoder takes the usual shapes in about a microsecond and skips everything else unread. What
it refuses (a member of an unexpected type, a lone surrogate) is read leniently: a gateway measures what
it can and never makes an answer fail over a field that only the client understands.
"""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec

EMPTY: Final = msgspec.Raw(b"")
_FALSY: Final = (b"", b"null", b"false", b'""', b"{}", b"[]")


class Function(msgspec.Struct, gc=False):
    """A tool call's function, or the older `function_call`."""

    arguments: str | None = None


class ToolCall(msgspec.Struct, gc=False):
    """A tool call, whole or in part."""

    function: Function | None = None


class Message(msgspec.Struct):
    """A delta or a message."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: Function | None = None


class Choice(msgspec.Struct):
    """One choice of chat (`delta`, `message`) or completions (`text`)."""

    index: int = 0
    delta: Message | None = None
    message: Message | None = None
    text: str | None = None
    finish_reason: str | None = None


class Fields(msgspec.Struct):
    """A chunk or an answer. Raw members are EMPTY when absent; null stays b"null"."""

    choices: list[Choice] | None = None
    object: str | None = None
    usage: msgspec.Raw = EMPTY
    error: msgspec.Raw = EMPTY
    metrics: msgspec.Raw = EMPTY
    system_fingerprint: str | None = None


decode_typed: Final = msgspec.json.Decoder(Fields).decode


def decode_lenient(payload: bytes) -> Fields | None:
    """The same members of an object in an unusual shape; None when it is no JSON object at all."""
    try:
        record = json.loads(payload)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    choices = record.get("choices")
    fingerprint = record.get("system_fingerprint")
    return Fields(
        choices=[_choice(item) for item in choices if isinstance(item, dict)]
        if isinstance(choices, list)
        else None,
        object=record["object"] if isinstance(record.get("object"), str) else None,
        usage=_raw(record, "usage"),
        error=_raw(record, "error"),
        metrics=_raw(record, "metrics"),
        system_fingerprint=fingerprint if isinstance(fingerprint, str) else None,
    )


def is_set(raw: msgspec.Raw) -> bool:
    """Whether a raw member is there and neither null nor empty."""
    return raw is not EMPTY and bytes(raw) not in _FALSY


def text_size(choice: Choice) -> int:
    """UTF-8 bytes of text the model produced in this choice: content, reasoning, refusal, arguments.

    `reasoning` and `reasoning_content` are two names of one text; a chunk that carries both counts once.
    """
    message = choice.delta or choice.message
    if message is None:
        return _utf8(choice.text) if choice.text else 0
    size = _utf8(message.content) if message.content else 0
    thought = message.reasoning or message.reasoning_content
    if thought:
        size += _utf8(thought)
    if message.refusal:
        size += _utf8(message.refusal)
    if message.tool_calls:
        size += sum(_arguments(call.function) for call in message.tool_calls)
    if message.function_call:
        size += _arguments(message.function_call)
    return size


def _arguments(function: Function | None) -> int:
    return _utf8(function.arguments) if function and function.arguments else 0


def _utf8(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _raw(record: dict[str, Any], name: str) -> msgspec.Raw:
    value = record.get(name, EMPTY)
    return EMPTY if value is EMPTY else msgspec.Raw(json.dumps(value).encode())


def _choice(item: dict[str, Any]) -> Choice:
    index, reason = item.get("index"), item.get("finish_reason")
    message = item.get("delta") or item.get("message")
    return Choice(
        index=index if type(index) is int else 0,
        delta=_message(message) if isinstance(message, dict) else None,
        text=_text(item.get("text")),
        finish_reason=reason if isinstance(reason, str) else None,
    )


def _message(item: dict[str, Any]) -> Message:
    calls = item.get("tool_calls")
    return Message(
        content=_text(item.get("content")),
        reasoning=_text(item.get("reasoning")),
        reasoning_content=_text(item.get("reasoning_content")),
        refusal=_text(item.get("refusal")),
        tool_calls=[ToolCall(_function(call.get("function"))) for call in calls if isinstance(call, dict)]
        if isinstance(calls, list)
        else None,
        function_call=_function(item.get("function_call")),
    )


def _function(item: object) -> Function | None:
    """Arguments are a string; some upstreams send the object itself."""
    if not isinstance(item, dict):
        return None
    arguments = item.get("arguments")
    if arguments is None or isinstance(arguments, str):
        return Function(arguments)
    return Function(json.dumps(arguments, separators=(",", ":"), ensure_ascii=False))


def _text(value: object) -> str | None:
    """A text, or the joined texts of a list of content parts."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        parts = [part.get("text") for part in value if isinstance(part, dict)]
        return "".join(part for part in parts if isinstance(part, str))
    return None
