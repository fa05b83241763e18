"""Request bodies as views over their own bytes.

A body is decoded once, one level deep: every member stays the exact slice the client sent. What the
gateway adds is spliced into those bytes, so that an untouched body leaves as it came and a prompt's
text is never re-serialized (a re-serialized prompt is another prompt to the prefix cache).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_WHITESPACE: Final = b" \t\r\n"
_QUOTE: Final = 0x22
_BACKSLASH: Final = 0x5C
_MEMBERS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ITEMS: Final = msgspec.json.Decoder(list[msgspec.Raw])
_ANY: Final = msgspec.json.Decoder()


class NotJson(ValueError):
    """The body is not JSON; the message says where it stops being so."""


class NotAnObject(ValueError):
    """The body is JSON, but not an object."""


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace `raw[start:end]` by `text`; `start == end` inserts."""

    start: int
    end: int
    text: bytes


@dataclass(frozen=True, slots=True)
class Body:
    """A JSON object: its bytes, and each member's value as a slice of them.

    Of a repeated member the last one counts, as in every JSON reader that vLLM uses.
    """

    raw: bytes = field(repr=False)
    members: Mapping[str, msgspec.Raw] = field(repr=False)

    def has(self, name: str) -> bool:
        """Whether the member is there and not null."""
        value = self.members.get(name)
        return value is not None and bytes(value) != b"null"

    def value(self, name: str) -> Any:
        """The member decoded, or None when it is absent or null. Meant for small members."""
        value = self.members.get(name)
        return None if value is None else _ANY.decode(value)

    def items(self, name: str) -> list[msgspec.Raw]:
        """The elements of an array member, undecoded; raises `msgspec.ValidationError` if it is no array."""
        return _ITEMS.decode(self.members[name])

    def kind(self, name: str) -> str:
        """The first character of a member's value (`[`, `{`, `"`, a digit, ...); empty when it is absent."""
        value = self.members.get(name)
        return "" if value is None else chr(memoryview(value)[0])

    def size(self, name: str) -> int:
        """Bytes of a member's value; 0 when it is absent."""
        value = self.members.get(name)
        return 0 if value is None else memoryview(value).nbytes


def parse(raw: bytes) -> Body:
    """Decode one level of a request body. Raises `NotJson` or `NotAnObject`."""
    try:
        return Body(raw, _MEMBERS.decode(raw))
    except msgspec.ValidationError as error:
        raise NotAnObject("the request body must be a JSON object") from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise NotJson(f"the request body is not valid JSON: {error}") from error


def splice(raw: bytes, edits: Sequence[Edit]) -> bytes:
    """Apply edits that do not overlap; everything outside them stays byte for byte."""
    parts: list[bytes | memoryview] = []
    position = 0
    view = memoryview(raw)
    for edit in sorted(edits, key=lambda e: e.start):
        if edit.start < position:
            raise ValueError("edits overlap")
        parts += (view[position : edit.start], edit.text)
        position = edit.end
    parts.append(view[position:])
    return b"".join(parts)


def with_member(body: Body, name: str, value: bytes) -> bytes:
    """The object's bytes with `name: value`: in place of the old value, else as a new last member.

    A replacement is read back: where repeated members have led it astray, the member is appended
    instead, and counts because it is the last of its name.
    """
    span = _member_span(body, name) if name in body.members else None
    if span is not None:
        replaced = splice(body.raw, [Edit(*span, value)])
        if bytes(_MEMBERS.decode(replaced).get(name, msgspec.Raw(b""))) == value:
            return replaced
    end = body.raw.rindex(b"}")
    comma = b"," if body.members else b""
    return splice(body.raw, [Edit(end, end, comma + msgspec.json.encode(name) + b":" + value)])


def _member_span(body: Body, name: str) -> tuple[int, int] | None:
    """Where a member's value lies in the bytes, or None when repeated members hide it.

    Walks from member to member by the known lengths of their values, so that the cost is in the
    number of members, not in the size of the prompt.
    """
    position = body.raw.index(b"{") + 1
    try:
        for member, value in body.members.items():
            start = _value_start(body.raw, position)
            position = start + memoryview(value).nbytes
            if member == name:
                return (start, position) if body.raw[start:position] == bytes(value) else None
    except (ValueError, IndexError):  # a repeated member's length has led past the end
        return None
    return None


def _value_start(raw: bytes, position: int) -> int:
    """The first byte of the value of the member whose name is the next string."""
    position = raw.index(_QUOTE, position) + 1
    while raw[position] != _QUOTE:
        position += 2 if raw[position] == _BACKSLASH else 1
    position = raw.index(b":", position + 1) + 1
    while raw[position] in _WHITESPACE:
        position += 1
    return position
