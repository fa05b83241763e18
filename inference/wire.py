"""Request bodies as views over their own bytes.

A body is decoded once, one level deep: every member stays the exact slice the client sent. What the
gateway adds is spliced into those bytes, so that an untouched body leaves as it came and a prompt's
text is never re-serialized (a re-serialized prompt is another prompt to the prefix cache).
"""

from __future__ import annotations

from bisect import bisect_right
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias, TypeVar, cast

import msgspec

from ctxgate.inference.frame import WHITESPACE, Frame, Span, frame_at, framed, walked
from ctxgate.inference.wire_fields import ENGINE_FIELDS, KNOWN

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

T = TypeVar("T")

_QUOTE: Final = 0x22
_BACKSLASH: Final = 0x5C
_BRACE: Final = 0x7D
_MEMBERS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ITEMS: Final = msgspec.json.Decoder(list[msgspec.Raw])
_ITEM: Final = msgspec.json.Decoder(msgspec.Raw)
_ANY: Final = msgspec.json.Decoder()
_ABSENT: Final = msgspec.Raw(b"")


class _Known(msgspec.Struct):
    """The members a gateway acts on; those of KNOWN are added to the class below, as raw values."""

    messages: list[msgspec.Raw] | None = None


def _known_decoder() -> msgspec.json.Decoder[_Known]:
    fields = [(name, msgspec.Raw, _ABSENT) for name in sorted(KNOWN)]
    return msgspec.json.Decoder(cast("type[_Known]", msgspec.defstruct("_Members", fields, bases=(_Known,))))


_KNOWN: Final = _known_decoder()
_ENGINE_NAMES: Final = tuple(sorted(ENGINE_FIELDS))
_engine_values: Final = attrgetter(*_ENGINE_NAMES)


Pieces: TypeAlias = "tuple[bytes | memoryview, ...]"
"""Bytes in parts, so that a prompt of megabytes is not copied for a few added ones."""


class NotJson(ValueError):
    """The body is not JSON; the message says where it stops being so."""


class NotAnObject(ValueError):
    """The body is JSON, but not an object."""


class Edit(NamedTuple):
    """Replace `raw[start:end]` by `text`; `start == end` inserts."""

    start: int
    end: int
    text: bytes


class Body:
    """A JSON object: its bytes, and its members as slices of them.

    The members a gateway acts on are found in the one scan that checks the body; the others when they
    are first asked for. Of a repeated member the last one counts, as in every reader that vLLM uses.
    """

    __slots__ = ("_frame", "_known", "_members", "raw")

    def __init__(self, raw: bytes, known: _Known | None, members: Mapping[str, msgspec.Raw] | None) -> None:
        self.raw = raw
        self._known = known
        self._members = members
        self._frame: Frame | Literal["unknown", "none"] = "unknown"

    @property
    def members(self) -> Mapping[str, msgspec.Raw]:
        """Every member, in order; costs a look at every byte the first time."""
        if self._members is None:
            frame = self.frame()
            if frame is None:
                self._members = decoded(_MEMBERS, self.raw)
            else:
                messages = msgspec.Raw(memoryview(self.raw)[frame.start : frame.end])
                self._members = {**frame.members, "messages": messages}
        return self._members

    def frame(self) -> Frame | None:
        """The body around its messages; None where it has none, or their place is not certain."""
        if self._frame == "unknown":
            messages = None if self._known is None else self._known.messages
            self._frame = "none" if messages is None else framed(self.raw, messages) or "none"
        return None if self._frame == "none" else self._frame

    def get(self, name: str) -> msgspec.Raw | None:
        """A member's value as it stands in the body, or None when it is absent."""
        if self._known is None or name not in KNOWN:
            return self.members.get(name)
        value: msgspec.Raw = getattr(self._known, name)
        return None if value is _ABSENT else value

    @property
    def engine_fields(self) -> tuple[str, ...]:
        """Those of ENGINE_FIELDS that are there, whatever they hold."""
        if self._known is None:
            return tuple(name for name in _ENGINE_NAMES if name in self.members)
        values = _engine_values(self._known)
        if values.count(_ABSENT) == len(values):  # it is one object, so that this compares no contents
            return ()
        return tuple(name for name, value in zip(_ENGINE_NAMES, values, strict=True) if value is not _ABSENT)

    def has(self, name: str) -> bool:
        """Whether the member is there and not null."""
        if name == "messages" and self._known is not None and self._known.messages is not None:
            return True
        value = self.get(name)
        return value is not None and not (self.size(name) == len(b"null") and bytes(value) == b"null")

    def value(self, name: str) -> Any:
        """The member decoded, or None when it is absent or null. Raises `msgspec.DecodeError`.

        Meant for small members.
        """
        value = self.get(name)
        return None if value is None else decoded(_ANY, value)

    def items(self, name: str) -> list[msgspec.Raw]:
        """The elements of an array member, undecoded. Raises `msgspec.ValidationError` if it is no array."""
        if name == "messages" and self._known is not None and self._known.messages is not None:
            return self._known.messages
        return decoded(_ITEMS, self.get(name) or b"null")

    def kind(self, name: str) -> str:
        """The first character of a member's value (`[`, `{`, `"`, a digit, ...); empty when it is absent."""
        value = self.get(name)
        return "" if value is None else chr(memoryview(value)[0])

    def size(self, name: str) -> int:
        """Bytes of a member's value; 0 when it is absent."""
        value = self.get(name)
        return 0 if value is None else memoryview(value).nbytes


def decoded(decoder: msgspec.json.Decoder[T], value: bytes | msgspec.Raw) -> T:
    """A part of a checked body. Raises `msgspec.DecodeError`, also for nesting beyond the parser's depth.

    That depth is the interpreter's own, so that a part may be too deep where the whole was not.
    """
    try:
        return decoder.decode(value)
    except RecursionError as error:
        raise msgspec.DecodeError("nested too deeply") from error


def parse(raw: bytes) -> Body:
    """Check a request body and find its members, in one scan. Raises `NotJson` or `NotAnObject`."""
    try:
        return Body(raw, _KNOWN.decode(raw), None)
    except msgspec.ValidationError:
        return _parse_members(raw)  # `messages` is no array: the caller says so, naming the field
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise NotJson(f"the request body is not valid JSON: {error}") from error


def _parse_members(raw: bytes) -> Body:
    try:
        return Body(raw, None, _MEMBERS.decode(raw))
    except msgspec.ValidationError as error:
        raise NotAnObject("the request body must be a JSON object") from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise NotJson(f"the request body is not valid JSON: {error}") from error


def splice(raw: bytes, edits: Sequence[Edit]) -> Pieces:
    """Apply edits that do not overlap; everything outside them stays byte for byte, and is not copied."""
    parts: list[bytes | memoryview] = []
    position = 0
    view = memoryview(raw)
    for edit in sorted(edits, key=lambda e: e.start):
        if edit.start < position:
            raise ValueError("edits overlap")
        parts += (view[position : edit.start], edit.text)
        position = edit.end
    parts.append(view[position:])
    return tuple(parts)


def with_member(body: Body, name: str, value: bytes) -> Pieces:
    """The object's bytes with `name: value`; see `with_members`."""
    return with_members(body, {name: value})


def with_members(body: Body, members: Mapping[str, bytes]) -> Pieces:
    """The object's bytes with these members: each in place of its old value, else as a new last one.

    Replacements are read back: where repeated members have led one astray, all are appended instead, and
    count because they are the last of their names.
    """
    frame = None if "messages" in members else body.frame()
    raw = body.raw if frame is None else frame.text
    edits: dict[str, Edit] = {}
    for name, value in members.items():
        span = _span_in(body, frame, name) if body.get(name) is not None else None
        if span is not None:
            edits[name] = Edit(*span, value)
    if edits and not _read_back(b"".join(splice(raw, [*edits.values()])), edits):
        edits = {}
    replaced = [*edits.values()]
    if frame is not None:
        replaced = [Edit(*frame.outer((edit.start, edit.end)), edit.text) for edit in replaced]
    added = [msgspec.json.encode(name) + b":" + value for name, value in members.items() if name not in edits]
    if added:
        end = body.raw.rindex(b"}")
        comma = b"" if _is_empty(body.raw) else b","
        replaced.append(Edit(end, end, comma + b",".join(added)))
    return splice(body.raw, replaced)


def _read_back(raw: bytes, edits: Mapping[str, Edit]) -> bool:
    """Whether an edited object holds what was written into it."""
    try:
        members = decoded(_MEMBERS, raw)
    except msgspec.DecodeError:  # repeated members have led a replacement into a text
        return False
    return all(bytes(members.get(name, _ABSENT)) == edit.text for name, edit in edits.items())


def _is_empty(raw: bytes) -> bool:
    """Whether an object has no member."""
    position = raw.index(b"{") + 1
    while raw[position] in WHITESPACE:
        position += 1
    return raw[position] == _BRACE


def array_spans(body: Body, name: str) -> Sequence[Span] | None:
    """Where the elements of an array member lie in the bytes, or None when their place is not certain.

    Raises `msgspec.ValidationError` if it is no array.
    """
    items = body.items(name)
    frame = body.frame()
    if name == "messages":
        return None if frame is None else frame.spans
    outer = _span_in(body, frame, name)
    if outer is None:
        return None
    return walked(body.raw, outer[0] if frame is None else frame.outer(outer)[0], items)


def rewritten(body: Body, edits: Sequence[Edit]) -> Body | None:
    """The body that edits inside messages and tools make, without a scan of what they leave alone.

    None unless each edit lies within one element of these two arrays and each element is one JSON value
    afterwards; then the result is what `parse` finds in the spliced bytes. Raises ValueError if edits
    overlap.
    """
    frame, known = body.frame(), body._known
    tool_spans = (array_spans(body, "tools") or ()) if body.kind("tools") == "[" else ()
    if frame is None or known is None:
        return None
    new_tools = _changed(body.raw, tool_spans, [edit for edit in edits if not frame.holds(edit.start)])
    new_messages = _changed(body.raw, frame.spans, [edit for edit in edits if frame.holds(edit.start)])
    if new_tools is None or new_messages is None:
        return None
    before = sum(
        len(text) - tool_spans[at][1] + tool_spans[at][0]
        for at, text in new_tools.items()
        if tool_spans[at][0] < frame.start
    )
    messages, spans, shift = list(known.messages or ()), [], before
    for at, (start, end) in enumerate(frame.spans):
        text = new_messages.get(at)
        first, shift = start + shift, shift if text is None else shift + len(text) - end + start
        spans.append((first, end + shift))
        if text is not None:
            messages[at] = msgspec.Raw(text)
    raw = b"".join(splice(body.raw, edits))
    after = frame_at(raw, frame.start + before, frame.end + shift, spans)
    return None if after is None else around(body, messages, raw, after)


def around(body: Body, messages: list[msgspec.Raw], raw: bytes, frame: Frame) -> Body:
    """What `body` has become, with a frame that was worked out and the messages in it."""
    others = {name: frame.members.get(name, _ABSENT) for name in KNOWN}
    known = body._known
    result = Body(raw, known and msgspec.structs.replace(known, messages=messages, **others), None)
    result._frame = frame
    return result


def _changed(raw: bytes, spans: Sequence[Span], edits: Sequence[Edit]) -> dict[int, bytes] | None:
    """The new text of each element that edits change, by its place; None where an edit is not inside one."""
    whole = {edit[:2]: edit.text for edit in edits}
    exact = {at: whole[span] for at, span in enumerate(spans) if span in whole}
    if len(exact) == len(edits):  # each replaces an element, as most do; no need to look for their places
        return exact if are_values(exact.values()) else None
    by_place: dict[int, list[Edit]] = {}
    starts = [start for start, _ in spans]
    for edit in edits:
        at = bisect_right(starts, edit.start) - 1
        if at < 0 or edit.end > spans[at][1] or edit.start > edit.end:
            return None
        by_place.setdefault(at, []).append(edit)
    found: dict[int, bytes] = {}
    for at, group in by_place.items():
        start, end = spans[at]
        if len(group) == 1 and (group[0].start, group[0].end) == (start, end):
            found[at] = group[0].text
        else:
            inner = [Edit(edit.start - start, edit.end - start, edit.text) for edit in group]
            found[at] = b"".join(splice(raw[start:end], inner))
    return found if are_values(found.values()) else None


def are_values(texts: Iterable[bytes]) -> bool:
    """Whether each text is one JSON value and nothing around it."""
    try:
        return all(memoryview(decoded(_ITEM, text)).nbytes == len(text) for text in texts)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False


def _span_in(body: Body, frame: Frame | None, name: str) -> Span | None:
    """Where a member's value lies in a frame, or in the body without one; None when repeated members hide it.

    Walks from member to member by the known lengths of their values, so that the cost is in the
    number of members, not in the size of the prompt.
    """
    raw, members = (body.raw, body.members) if frame is None else (frame.text, frame.members)
    position = raw.index(b"{") + 1
    try:
        for member, value in members.items():
            start = _value_start(raw, position)
            position = start + memoryview(value).nbytes
            if member == name:
                astray = frame is not None and start <= frame.start < position
                return None if astray or raw[start:position] != bytes(value) else (start, position)
    except (ValueError, IndexError):  # a repeated member's length has led past the end
        return None
    return None


def _value_start(raw: bytes, position: int) -> int:
    """The first byte of the value of the member whose name is the next string."""
    position = raw.index(_QUOTE, position) + 1
    while raw[position] != _QUOTE:
        position += 2 if raw[position] == _BACKSLASH else 1
    position = raw.index(b":", position + 1) + 1
    while raw[position] in WHITESPACE:
        position += 1
    return position
