"""Cuts and inserts at the top level of one JSON chunk; everything else stays byte for byte."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    import msgspec

_SPACE: Final = b" \t\r\n"
_TOKEN: Final = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\],:]', re.DOTALL)


class Member(NamedTuple):
    """A top-level member: its name, where the name's quote stands, and where the value ends."""

    name: str
    start: int
    end: int


def without_member(payload: bytes, name: str, value: msgspec.Raw) -> bytes:
    """The object without its member `name`, which has `value`.

    A name that occurs once in the bytes is the member itself, since inside a string its quotes would
    be escaped; otherwise the top level is walked, and repeated members are all cut.
    """
    quoted = b'"' + name.encode() + b'"'
    if payload.count(quoted) == 1:
        text = bytes(value)
        last = b"," + quoted + b":" + text + b"}"
        if payload.endswith(last):
            return payload[: -len(last)] + b"}"
        start = payload.index(quoted)
        end = _value_end(payload, start + len(quoted), text)
        if end is not None:
            return _cut(payload, start, end)
    for member in reversed(top_level(payload)):
        if member.name == name:
            payload = _cut(payload, member.start, member.end)
    return payload


def with_first(payload: bytes, member: bytes) -> bytes:
    """The object with `member` ('"name":value') put first; it must have other members."""
    start = payload.index(b"{") + 1
    return payload[:start] + member + b"," + payload[start:]


def with_last(payload: bytes, member: bytes) -> bytes:
    """The object with `member` ('"name":value') put last; it must have other members."""
    end = payload.rindex(b"}")
    return payload[:end] + b"," + member + payload[end:]


def top_level(payload: bytes) -> list[Member]:
    """The top-level members of a JSON object in order. The bytes must be valid JSON."""
    members: list[Member] = []
    depth, key, awaiting = 0, None, False
    for token in _TOKEN.finditer(payload):
        text = token.group()
        if text in (b"}", b",") and depth == 1 and key is not None:
            members.append(Member(_name(key.group()), key.start(), _trimmed(payload, token.start())))
            key = None
        if text in (b"{", b"["):
            depth += 1
            awaiting = depth == 1
        elif text in (b"}", b"]"):
            depth -= 1
        elif text == b"," and depth == 1:
            awaiting = True
        elif awaiting and depth == 1 and text[0] == 0x22:
            key, awaiting = token, False
    return members


def _name(quoted: bytes) -> str:
    return str(json.loads(quoted))  # takes lone surrogates, too


def _trimmed(payload: bytes, end: int) -> int:
    while payload[end - 1] in _SPACE:
        end -= 1
    return end


def _value_end(payload: bytes, position: int, value: bytes) -> int | None:
    """Where `value` ends if it is what follows the colon at `position`, spaces aside."""
    while payload[position] in _SPACE:
        position += 1
    if payload[position : position + 1] != b":":
        return None
    position += 1
    while payload[position] in _SPACE:
        position += 1
    return position + len(value) if payload.startswith(value, position) else None


def _cut(payload: bytes, start: int, end: int) -> bytes:
    """Remove a member and the one comma that belongs to it."""
    before = _trimmed(payload, start)
    if payload[before - 1 : before] == b",":
        return payload[: before - 1] + payload[end:]
    after = end
    while payload[after] in _SPACE:
        after += 1
    if payload[after : after + 1] != b",":
        return payload[:start] + payload[end:]
    after += 1
    while payload[after] in _SPACE:
        after += 1
    return payload[:start] + payload[after:]
