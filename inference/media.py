"""The parts of a chat message that are no text: pictures, sound, films and files.

An engine makes tokens of what they show, not of the base64 that they travel in, and a link to one is as long
as what it leads to. So each counts by its kind, within bounds, until an engine has measured some.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from ctxgate.inference.wire import decoded

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

LEAST_BYTES: Final = 1024
"""Shorter strings are text, whatever they look like."""

IMAGE_TOKENS: Final = 1000
"""About a screenful for models that take a token for each square of 28 pixels."""

LOW_IMAGE_TOKENS: Final = 100
"""The same for a picture that a client wants looked at in low detail."""

_BYTES_PER_TOKEN: Final = 1000  # of base64, of sound and films
_DEPTH: Final = 8  # of nesting in which strings are looked at; deeper ones count as text
_MEMBERS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ITEMS: Final = msgspec.json.Decoder(list[msgspec.Raw])
_TEXT_KINDS: Final = frozenset({"text", "input_text", "output_text", "refusal"})
_TEXT_MEMBERS: Final = frozenset(
    {"role", "name", "reasoning", "reasoning_content", "refusal", "tool_calls", "tool_call_id"}
)
_LOW: Final = re.compile(rb'"detail"\s*:\s*"low"')
_BASE64: Final = re.compile(rb'"[A-Za-z0-9+/_=\\-]+"')  # line breaks and slashes may be escaped
_KIND: Final = re.compile(rb'"(\w{1,40})"')


class _Bounds(NamedTuple):
    """The fewest and the most tokens that one part counts as."""

    least: int
    most: int


_IMAGE: Final = _Bounds(IMAGE_TOKENS, IMAGE_TOKENS)
_AUDIO: Final = _Bounds(100, 10_000)
_LONG: Final = _Bounds(1000, 20_000)
_KINDS: Final[Mapping[str, _Bounds]] = {
    "image": _IMAGE,
    "image_url": _IMAGE,
    "input_image": _IMAGE,
    "image_embeds": _IMAGE,
    "audio": _AUDIO,
    "audio_url": _AUDIO,
    "input_audio": _AUDIO,
    "video": _LONG,
    "video_url": _LONG,
    "input_video": _LONG,
    "file": _LONG,
    "input_file": _LONG,
}


class Medium(NamedTuple):
    """One part that is no text: its JSON, and about how many tokens an engine makes of it."""

    raw: bytes
    tokens: int


def media_in(message: bytes) -> list[Medium]:
    """What of a message in JSON is no text, in whatever member it is; none where it is no message.

    Content that is a string is text, and so are a call's arguments and reasoning, also where base64 stands in
    them: an engine reads it letter by letter.
    """
    if not message.startswith(b"{"):
        return []
    try:
        members = decoded(_MEMBERS, message)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return []
    found: list[Medium] = []
    for name, value in members.items():
        if name == "content":
            found += _parts(bytes(value))
        elif name not in _TEXT_MEMBERS and memoryview(value).nbytes >= LEAST_BYTES:
            found += _embedded(bytes(value))
    return found


def _parts(content: bytes) -> Iterator[Medium]:
    """What is no text of a message's content."""
    if not content.startswith(b"["):
        return
    for item in _items(content):
        part = bytes(item)
        members = _members(part)
        kind = _kind(members)
        bounds = _KINDS.get(kind)
        if bounds is not None:
            yield Medium(part, _tokens(part, bounds))
        elif members and kind not in _TEXT_KINDS:
            yield from _embedded(part)


def _kind(members: Mapping[str, msgspec.Raw]) -> str:
    """What a part is; of one that does not say so, the member that it is made of."""
    if "type" in members:
        named = _KIND.fullmatch(bytes(members["type"]))
        return "" if named is None else named[1].decode()
    given = (name for name in members if name in _KINDS and bytes(members[name]) != b"null")
    return next(given, "text" if "text" in members else "")


def _tokens(part: bytes, bounds: _Bounds) -> int:
    if bounds is _IMAGE and _LOW.search(part):
        return LOW_IMAGE_TOKENS
    return min(max(len(part) // _BYTES_PER_TOKEN, bounds.least), bounds.most)


def _embedded(value: bytes, depth: int = 0) -> Iterator[Medium]:
    """Long strings of base64, and data URLs, inside a JSON value."""
    if len(value) < LEAST_BYTES or depth > _DEPTH:
        return
    if value.startswith(b'"'):
        if value.startswith(b'"data:') or _BASE64.fullmatch(value):
            yield Medium(value, IMAGE_TOKENS)
        return
    for inner in _members(value).values() if value.startswith(b"{") else _items(value):
        yield from _embedded(bytes(inner), depth + 1)


def _members(value: bytes) -> dict[str, msgspec.Raw]:
    try:
        return decoded(_MEMBERS, value) if value.startswith(b"{") else {}
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}


def _items(value: bytes) -> list[msgspec.Raw]:
    try:
        return decoded(_ITEMS, value) if value.startswith(b"[") else []
    except (msgspec.DecodeError, UnicodeDecodeError):
        return []
