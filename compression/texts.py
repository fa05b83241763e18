"""The texts of one chat message, to be read and changed; everything else of it keeps its bytes.

A message's content is a text, or a list of parts of which some are texts. A part is known by its index;
content that is a text is part 0.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import msgspec

from ctxgate.inference.wire import decoded

if TYPE_CHECKING:
    from collections.abc import Iterator

GATEWAY_MARK: Final = "ctxgate"
CACHE_MARK: Final = "cache_control"
MARKS: Final = (GATEWAY_MARK, CACHE_MARK)
"""Members of a message or a part that speak to a gateway or a cache; no template prints them."""

_TEXT_KINDS: Final = frozenset({"text", "input_text", "output_text"})
_MEMBERS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ITEMS: Final = msgspec.json.Decoder(list[msgspec.Raw])
_STRING: Final = msgspec.json.Decoder(str)
_NULL: Final = msgspec.Raw(b"null")
_QUOTE: Final = 0x22
_BRACKET: Final = 0x5B
_BRACE: Final = 0x7B
_NAME: Final = re.compile(rb'[\s,]*"(?:[^"\\]|\\.)*"\s*:\s*', re.DOTALL)

Members = dict[str, msgspec.Raw]


class MessageTexts:
    """A message whose texts can be replaced and whose marks can be taken off.

    `members` are those of the message, `parts` those of each part of a content list (a part that is no
    object has none). What is not touched is written back as the slice it was.
    """

    __slots__ = ("_items", "_single", "members", "parts")

    def __init__(self, members: Members, items: list[msgspec.Raw] | None) -> None:
        self.members = members
        self._single = items is None
        self._items = items or []
        self.parts: list[Members] = [
            decoded(_MEMBERS, item) if memoryview(item)[0] == _BRACE else {} for item in self._items
        ]

    @classmethod
    def read(cls, raw: msgspec.Raw | bytes) -> Self | None:
        """A message decoded two levels deep, or None where it is no object."""
        try:
            members = decoded(_MEMBERS, raw)
            content = members.get("content")
            listed = content is not None and memoryview(content)[0] == _BRACKET
            return cls(members, decoded(_ITEMS, content) if listed and content is not None else None)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None

    def __len__(self) -> int:
        """How many parts the content has; a text is one."""
        return ("content" in self.members) if self._single else len(self._items)

    def text(self, at: int) -> str | None:
        """A part's text; None where it is something else, or no well-formed Unicode."""
        if self._single:
            return _string(self.members.get("content"))
        if not self.parts[at]:
            return _string(self._items[at])
        kind = _string(self.parts[at].get("type")) or "text"
        return _string(self.parts[at].get("text")) if kind in _TEXT_KINDS else None

    def texts(self) -> Iterator[tuple[int, str]]:
        """The parts that are texts."""
        for at in range(len(self)):
            text = self.text(at)
            if text is not None:
                yield at, text

    def put(self, at: int, text: str) -> None:
        """Replace the text of a part that has one."""
        value = msgspec.Raw(msgspec.json.encode(text))
        if self._single:
            self.members["content"] = value
        elif not self.parts[at]:
            self._items[at] = value
        else:
            self.parts[at]["text"] = value

    def drop_last(self) -> None:
        """Take the last part of a content list away."""
        del self._items[-1], self.parts[-1]

    def is_list(self) -> bool:
        """Whether the content is a list of parts."""
        return not self._single

    def is_empty(self) -> bool:
        """Whether there is no content: null, or none at all."""
        return self._single and bytes(self.members.get("content", _NULL)) == bytes(_NULL)

    def unmark(self, *names: str) -> bool:
        """Take marks off the message and its parts. Returns whether there were any."""
        found = False
        for members in (self.members, *self.parts):
            for name in names:
                found |= members.pop(name, None) is not None
        return found

    def raw(self) -> bytes:
        """The message as JSON."""
        members = dict(self.members)
        if not self._single:
            items = [
                msgspec.Raw(msgspec.json.encode(part)) if part else item
                for part, item in zip(self.parts, self._items, strict=True)
            ]
            members["content"] = msgspec.Raw(msgspec.json.encode(items))
        return msgspec.json.encode(members)


class End(NamedTuple):
    """Where a text goes at the end of a message's content: `raw[start:stop]` gives way to it.

    `before` and `after` stand around the text, which is JSON-escaped.
    """

    start: int
    stop: int
    before: bytes
    after: bytes


def end_of_content(raw: bytes) -> End | None:
    """Where a text can be added to the end of a message's content.

    That is the end of a content text, or a part of its own in a list; no content (null, or none at all)
    gives way to the text. None where the content is something else, or repeated members hide it.
    """
    message = MessageTexts.read(raw)
    if message is None:
        return None
    position = raw.index(b"{") + 1
    end: End | None = None
    if "content" not in message.members:
        end = End(position, position, b'"content":"', b'",' if message.members else b'"')
    for name, value in message.members.items():
        found = _NAME.match(raw, position)
        if found is None:
            return None
        start, position = found.end(), found.end() + memoryview(value).nbytes
        if name == "content":
            if raw[start:position] != bytes(value):
                return None
            end = _end(message, start, position)
    return end if raw[position:].strip() == b"}" else None


def _end(message: MessageTexts, start: int, stop: int) -> End | None:
    """Where a text can be added to the content that stands at these bytes."""
    if message.is_empty():
        return End(start, stop, b'"', b'"')
    if message.is_list():
        comma = b"," if len(message) else b""
        return End(stop - 1, stop - 1, comma + b'{"type":"text","text":"', b'"}')
    return End(stop - 1, stop - 1, b"\\n\\n", b"") if message.text(0) is not None else None


def escaped(text: str) -> bytes:
    """A text as it stands inside a JSON string."""
    return msgspec.json.encode(text)[1:-1]


def _string(value: msgspec.Raw | None) -> str | None:
    if value is None or memoryview(value)[0] != _QUOTE:
        return None
    try:
        return decoded(_STRING, value)
    except (msgspec.DecodeError, UnicodeDecodeError):  # a lone surrogate
        return None
