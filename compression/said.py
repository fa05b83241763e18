"""What one chat message says, as texts: read once, off the hot path, by everything that summarizes.

Texts read here are well-formed Unicode: half a surrogate pair, which clients escape as `\\ud83d`, becomes
U+FFFD and is counted. The wire keeps its own bytes; only what is written anew comes from here.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ctxgate.compression.texts import GATEWAY_MARK, MessageTexts

if TYPE_CHECKING:
    from collections.abc import Mapping

_ANY: Final = msgspec.json.Decoder()
_SURROGATES: Final = re.compile("[\ud800-\udfff]")
_TEXT_KINDS: Final = frozenset({"text", "input_text", "output_text", "refusal"})


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call: its id, the tool's name, and its arguments as the text they are on the wire."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Said:
    """One message.

    `text` joins the texts of its content by line breaks; a part that is no text stands in it as a
    placeholder with a hash (`[image_url 3f2a...]`), so that none vanishes unseen. `answers` is the id of
    the call that a tool result answers. `pinned`: the client marked it `{"ctxgate": {"pin": true}}`.
    `repaired` counts the lone surrogates that were replaced. A message that cannot be read has no role.
    """

    role: str = ""
    text: str = ""
    calls: tuple[Call, ...] = ()
    answers: str | None = None
    pinned: bool = False
    repaired: int = 0


def read_said(raw: bytes | msgspec.Raw) -> Said:
    """Read a message. Never raises: what is no message is `Said()`."""
    message = _value(raw)
    if not isinstance(message, dict):
        return Said()
    reader = _Reader()
    text = reader.content(message.get("content"))
    calls = tuple(reader.call(call) for call in _list(message.get("tool_calls")) if isinstance(call, dict))
    return Said(
        role=_text(message.get("role")),
        text=text,
        calls=calls,
        answers=_text(message.get("tool_call_id")) if message.get("role") == "tool" else None,
        pinned=_is_pinned(message),
        repaired=reader.repaired,
    )


def repaired(text: str) -> tuple[str, int]:
    """A text without lone surrogates, and how many were replaced by U+FFFD."""
    if text.isascii():
        return text, 0
    joined = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    return _SURROGATES.subn("\ufffd", joined)


def with_text(raw: bytes | msgspec.Raw, text: str) -> bytes:
    """A message whose whole content is `text`; every other member keeps its bytes.

    (Not where the message holds half a surrogate pair: then it is written anew.) Raises ValueError for
    what is no message.
    """
    message = MessageTexts.read(raw)
    if message is None:
        value = _value(raw)
        if not isinstance(value, dict):
            raise ValueError("not a message")
        return json.dumps({**value, "content": text}).encode()
    members = dict(message.members)
    members["content"] = msgspec.Raw(msgspec.json.encode(text))
    return msgspec.json.encode(members)


class _Reader:
    def __init__(self) -> None:
        self.repaired = 0

    def content(self, value: Any) -> str:
        if isinstance(value, str):
            return self._clean(value)
        return "\n".join(self._part(part) for part in _list(value))

    def call(self, call: Mapping[str, Any]) -> Call:
        function = call.get("function")
        if not isinstance(function, dict):
            function = {}
        arguments = function.get("arguments")
        if arguments is None:
            arguments = ""
        if not isinstance(arguments, str):  # some engines give the value itself
            arguments = json.dumps(arguments, ensure_ascii=False)
        return Call(_text(call.get("id")), _text(function.get("name")), self._clean(arguments))

    def _part(self, part: Any) -> str:
        if isinstance(part, str):
            return self._clean(part)
        if not isinstance(part, dict):
            return ""
        kind = _text(part.get("type")) or "text"
        if kind in _TEXT_KINDS:
            return self._clean(_text(part.get("text") or part.get("refusal")))
        form = json.dumps(part, sort_keys=True).encode()
        return f"[{kind} {blake2b(form, digest_size=8).hexdigest()}]"

    def _clean(self, text: str) -> str:
        text, count = repaired(text)
        self.repaired += count
        return text


def _value(raw: bytes | msgspec.Raw) -> Any:
    try:
        return _ANY.decode(raw)
    except (msgspec.DecodeError, ValueError, RecursionError):
        pass  # a lone surrogate, which the standard library's reader takes
    try:
        return json.loads(bytes(raw))
    except (ValueError, RecursionError):
        return None


def _is_pinned(message: Mapping[str, Any]) -> bool:
    marks = [message.get(GATEWAY_MARK)]
    marks += [part.get(GATEWAY_MARK) for part in _list(message.get("content")) if isinstance(part, dict)]
    return any(isinstance(mark, dict) and mark.get("pin") is True for mark in marks)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
