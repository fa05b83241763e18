"""A long JSON value made shorter, still JSON: long texts and lists lose their middle and say how much.

Every value that stays keeps its own bytes (numbers are never read as floats); keys stay in their order.
Elements of a list that speak of an error stay before others do.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from ctxgate.compression.said import repaired

if TYPE_CHECKING:
    from collections.abc import Callable

MEMBER: Final = "ctxgate_omitted"
"""The member of an object that says what was left out of it."""

_MEMBERS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ITEMS: Final = msgspec.json.Decoder(list[msgspec.Raw])
_TEXT: Final = msgspec.json.Decoder(str)
_ERROR: Final = re.compile(
    rb'"(?:error|errors|exception|traceback|stderr|failure|failed|fatal)"\s{0,4}:\s{0,4}(?!null|""|\[\]|\{\}|false|0\b)'
    rb'|"(?:status|level|state|severity|result|outcome)"\s{0,4}:\s{0,4}"(?:error|fail(?:ed|ure)?|fatal|critical)"',
    re.IGNORECASE,
)
_DEEPEST: Final = 40  # nested values below this one are left out whole
_ERROR_ITEMS: Final = 8


@dataclass(frozen=True, slots=True)
class Tightness:
    """How much stays: bytes of one text, items of one list, members of one object, levels of nesting."""

    text: int
    items: int
    members: int
    depth: int


LADDER: Final = tuple(
    Tightness(text, items, members, depth)
    for text, items, members, depth in (
        (8000, 200, 400, 40),
        (4000, 100, 200, 20),
        (2000, 50, 120, 12),
        (1000, 24, 80, 10),
        (500, 12, 60, 8),
        (250, 8, 40, 6),
        (120, 4, 24, 5),
        (80, 2, 12, 4),
        (60, 1, 6, 2),
    )
)


def shaped(raw: bytes, tightness: Tightness, note: str, shorten: Callable[[str, int], str]) -> bytes | None:
    """A JSON object or array within `tightness`, with `note` in it; None if it is no valid one.

    `shorten` makes a text at most that many bytes long.
    """
    try:
        value = _Shaper(tightness, shorten).container(raw, 0)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    return value and _with_note(value, note)


def empty(raw: bytes, note: str) -> bytes:
    """An object or array, as `raw` is one, that holds nothing but `note`."""
    return _with_note(b"[]" if raw.lstrip()[:1] == b"[" else b"{}", note)


def is_json(raw: bytes) -> bool:
    """Whether bytes are one valid JSON value."""
    try:
        msgspec.json.decode(raw, type=msgspec.Raw)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return False
    return True


class _Shaper:
    def __init__(self, tightness: Tightness, shorten: Callable[[str, int], str]) -> None:
        self._tight = tightness
        self._shorten = shorten

    def container(self, raw: bytes, depth: int) -> bytes | None:
        """An object or array, or None where the value is neither."""
        start = raw.lstrip()[:1]
        if start == b"{":
            return self._object(_MEMBERS.decode(raw), depth)
        if start == b"[":
            return self._array(_ITEMS.decode(raw), depth)
        return None

    def _value(self, raw: msgspec.Raw, depth: int) -> bytes:
        value = bytes(raw)
        if value[:1] == b'"':
            return value if len(value) <= self._tight.text else self._string(value)
        if value[:1] not in (b"{", b"["):
            return value
        if depth >= min(self._tight.depth, _DEEPEST):
            if len(value) <= 80:
                return value
            form = "object" if value[:1] == b"{" else "array"
            return msgspec.json.encode(f"[{form} of {len(value)} bytes left out]")
        found = self.container(value, depth)
        return value if found is None or len(found) >= len(value) else found

    def _string(self, raw: bytes) -> bytes:
        try:
            text = _TEXT.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return raw  # half a surrogate pair: the wire's own business
        short = msgspec.json.encode(self._shorten(repaired(text)[0], self._tight.text))
        return short if len(short) < len(raw) else raw

    def _object(self, members: dict[str, msgspec.Raw], depth: int) -> bytes:
        names = list(members)
        kept = set(_edges(len(names), self._tight.members))
        parts = [
            msgspec.json.encode(name) + b":" + self._value(members[name], depth + 1)
            for at, name in enumerate(names)
            if at in kept
        ]
        if len(kept) < len(names):
            left = f"{len(names) - len(kept)} of {len(names)} members left out"
            parts.append(msgspec.json.encode(MEMBER) + b":" + msgspec.json.encode(left))
        return b"{" + b",".join(parts) + b"}"

    def _array(self, items: list[msgspec.Raw], depth: int) -> bytes:
        kept = set(_edges(len(items), self._tight.items))
        if len(kept) < len(items):
            wanted = (at for at, item in enumerate(items) if at not in kept and _ERROR.search(bytes(item)))
            kept.update(
                at for at, _ in zip(wanted, range(min(_ERROR_ITEMS, self._tight.items)), strict=False)
            )
        parts: list[bytes] = []
        last = -1
        for at in sorted(kept):
            if at > last + 1:
                parts.append(_left_out(at - last - 1, len(items)))
            parts.append(self._value(items[at], depth + 1))
            last = at
        if last + 1 < len(items):
            parts.append(_left_out(len(items) - last - 1, len(items)))
        return b"[" + b",".join(parts) + b"]"


def _left_out(count: int, of: int) -> bytes:
    return msgspec.json.encode(f"[{count} of {of} items left out]")


def _edges(count: int, limit: int) -> list[int]:
    """Two thirds from the start and one third from the end, `limit` in all."""
    if count <= limit:
        return list(range(count))
    tail = limit // 3
    return [*range(limit - tail), *range(count - tail, count)]


def _with_note(value: bytes, note: str) -> bytes:
    text = msgspec.json.encode(note)
    inner = value[1:-1]
    comma = b"," if inner else b""
    if value[:1] == b"[":
        return b"[" + inner + comma + text + b"]"
    name = msgspec.json.encode("ctxgate_reference")
    return b"{" + inner + comma + name + b":" + text + b"}"
