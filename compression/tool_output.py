"""One tool result made shorter when it first arrives, and never again after.

Kept are its beginning and end, the lines that report errors with their surroundings, and what carries its
structure: JSON stays JSON, a diff keeps its headers, code its signatures, a table its head. A last line
names the id under which the original can be had. The same text gives the same bytes for ever: what is
written here goes out again with every later request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ctxgate.compression import json_shape
from ctxgate.compression.clusters import head_of, tail_of
from ctxgate.compression.error_lines import is_error, same_kind
from ctxgate.compression.said import read_said, repaired, with_text
from ctxgate.compression.structure import Kind, kind_of, structural
from ctxgate.compression.texts import MessageTexts

if TYPE_CHECKING:
    import msgspec

ALGORITHM: Final = 1
"""Counted up with any change of what this module writes; frozen results name the one that made them."""

LEAST_LIMIT: Final = 400
"""Bytes below which nothing sensible can be kept; smaller limits count as this."""

_CONTEXT: Final = 2  # lines kept before and after an error
_ERROR_SHARE: Final = 0.35  # of the room, and what the head, then the tail, may use of the rest
_HEAD_SHARE: Final = 0.25
_TAIL_SHARE: Final = 0.25
_MISSES: Final = 50  # lines too long for what is left, after which no shorter one is looked for
_GAP: Final = len("[... 1234567 lines left out ...]\n")


@dataclass(frozen=True, slots=True)
class Shrunk:
    """A tool result as it goes out: its text, what kind of text it was, and the bytes left out (0: none)."""

    text: str
    kind: Kind
    left_out: int


def reference_line(reference: str, size: int) -> str:
    """The line that says where the original of `size` bytes is."""
    return f"[Shortened by the gateway: {size} bytes in all; the original has the id {reference}.]"


def shrink(text: str, limit: int, reference: str) -> Shrunk:
    """A tool result of at most `limit` bytes of UTF-8, the reference included.

    A text within the limit comes back as it is, and so does one that would not become shorter. Lone
    surrogates in what is cut become U+FFFD.
    """
    limit = max(limit, LEAST_LIMIT + len(reference.encode()))
    if len(text) <= limit and len(text.encode("utf-8", "surrogatepass")) <= limit:
        return Shrunk(text, Kind.TEXT, 0)
    clean, _ = repaired(text)
    size = len(clean.encode())
    note = reference_line(reference, size)
    lines = clean.split("\n")
    kind = kind_of(clean, lines)
    if kind is Kind.JSON:
        found = _shaped(clean, limit, note)
        if found is not None:
            return Shrunk(found, kind, size - len(found.encode()))
        kind = kind_of("", lines)
    room = limit - len(note.encode()) - 1
    short = _selected(kind, lines, room)
    out = f"{short}\n{note}"
    if len(out.encode()) >= size:
        return Shrunk(text, kind, 0)
    return Shrunk(out, kind, size - len(out.encode()))


def shrink_message(raw: bytes | msgspec.Raw, limit: int, reference: str) -> bytes | None:
    """A tool message with each of its texts shrunk to `limit` bytes, or None where nothing changes.

    Parts that are no texts keep their bytes, and so do the message's other members.
    """
    message = MessageTexts.read(raw)
    if message is None or not message.is_list():
        said = read_said(raw)
        short = shrink(said.text, limit, reference)
        return with_text(raw, short.text) if short.left_out else None
    changed = False
    for at, text in list(message.texts()):
        short = shrink(text, limit, reference)
        if short.left_out:
            message.put(at, short.text)
            changed = True
    return message.raw() if changed else None


def excerpt(text: str, limit: int) -> str:
    """A text of at most `limit` bytes: the same choice of lines, without a reference."""
    if len(text.encode()) <= limit:
        return text
    lines = text.split("\n")
    return _selected(kind_of("", lines), lines, limit)


def split_oversize(text: str, limit: int, reference: str) -> str:
    """Head and tail of a message that alone is larger than the room for it, and the reference between."""
    clean, _ = repaired(text)
    size = len(clean.encode())
    if size <= limit:
        return text
    note = f"\n{reference_line(reference, size)}\n"
    room = max(limit - len(note.encode()), 0)
    tail = tail_of(clean, room // 3)
    out = head_of(clean, room - len(tail.encode())) + note + tail
    return out if len(out.encode()) < size else text


def _shaped(text: str, limit: int, note: str) -> str | None:
    """The loosest shape of a JSON text that fits, at worst the reference alone; None where it is no JSON."""
    raw = text.encode()
    if not json_shape.is_json(raw):
        return None
    for tightness in json_shape.LADDER:
        if tightness.text > limit:
            continue
        found = json_shape.shaped(raw, tightness, note, excerpt)
        if found is None:
            return None
        if len(found) <= limit:
            return found.decode()
    return json_shape.empty(raw, note).decode()


def _selected(kind: Kind, lines: list[str], room: int) -> str:
    """The lines that fit into `room` bytes, in their order, with a line for each gap."""
    lines = _narrowed(lines, max(120, room // min(4, len(lines))))
    chosen = _Choice(lines, room)
    if len(lines) > 1:
        errors = _errors(lines)
        chosen.take(range(len(lines)), int(room * _HEAD_SHARE))
        chosen.take(range(len(lines) - 1, -1, -1), int(room * _TAIL_SHARE))
        chosen.take(errors, int(room * _ERROR_SHARE), _MISSES)
        chosen.take(structural(kind, lines), room, _MISSES)
        chosen.take(range(len(lines) - 1, -1, -1), room // 3)
        chosen.take(range(len(lines)), room)
    if not chosen.taken:
        return _middle_cut("\n".join(lines), room)
    return chosen.text()


class _Choice:
    """Lines chosen within a room; a gap between chosen lines costs its own line."""

    def __init__(self, lines: list[str], room: int) -> None:
        self._lines = lines
        self._room = room - _GAP
        self.taken: set[int] = set()

    def take(self, wanted: list[int] | range, share: int, most_misses: int = 0) -> None:
        """Take lines in the order given, until more than `most_misses` did not fit.

        `share` is how many bytes they may use together.
        """
        misses = 0
        for at in wanted:
            if at in self.taken:
                continue
            cost = len(self._lines[at].encode()) + 1
            gaps = (1 - (at - 1 in self.taken) - (at + 1 in self.taken)) * _GAP
            if cost > share or cost + max(gaps, 0) > self._room:
                misses += 1
                if misses > most_misses:
                    return
                continue
            share -= cost
            self._room -= cost + gaps
            self.taken.add(at)

    def text(self) -> str:
        out: list[str] = []
        last = -1
        for at in [*sorted(self.taken), len(self._lines)]:
            if at > last + 1:
                out.append(f"[... {at - last - 1} lines left out ...]")
            if at < len(self._lines):
                out.append(self._lines[at])
            last = at
        return "\n".join(out)


def _errors(lines: list[str]) -> list[int]:
    """Lines that report errors: the first and last of each kind, then what stands around them, then all."""
    every = [at for at, line in enumerate(lines) if is_error(line)]
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for at in every:
        first.setdefault(same_kind(lines[at]), at)
        last[same_kind(lines[at])] = at
    main = list(dict.fromkeys([*first.values(), *last.values()]))
    around = [
        near for at in main for near in range(max(0, at - _CONTEXT), min(len(lines), at + _CONTEXT + 1))
    ]
    return list(dict.fromkeys([*main, *around, *every]))


def _narrowed(lines: list[str], width: int) -> list[str]:
    """Lines of at most `width` bytes; longer ones lose their middle."""
    return [
        line if len(line) * 4 <= width or len(line.encode()) <= width else _middle_cut(line, width)
        for line in lines
    ]


def _middle_cut(text: str, room: int) -> str:
    """The two ends of a text, and how many bytes stood between them."""
    size = len(text.encode())
    if size <= room:
        return text
    mark = len(f" [... {size} bytes left out ...] ")
    if room <= mark + 16:
        return head_of(text, room)
    tail = tail_of(text, (room - mark) // 3)
    head = head_of(text, room - mark - len(tail.encode()))
    left = size - len(head.encode()) - len(tail.encode())
    return f"{head} [... {left} bytes left out ...] {tail}"
