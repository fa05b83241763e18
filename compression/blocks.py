"""A text of the head as blocks: what may move on its own, and by which name it is known again.

A text is cut at headings, at XML-like elements, at blank lines, and around every line that holds a
volatile span. Joined again, the blocks are exactly the text.

- A *unit* is what may change its place: an element; a section, which is a heading and all that is below
  it; a paragraph outside of both; a volatile line that makes sense alone. A paragraph never leaves its
  heading, nor a line its element.
- A *block* is what may be taken out: a volatile line, or a paragraph or the rest of an element.
- A *slot* names a block by where it stands and what it is called, never by what it says: the tag, the
  heading, the words before a colon, else its number behind the last block that has such a name.
  Another user's memory, another list of files, is another text in the same slot.

Cost: linear in the text; the detector runs on short lines that it has not seen before.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

from ctxgate.compression.recent import Recent
from ctxgate.compression.volatile import find_volatile, masked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SLOT_BYTES: Final = 16
MAX_NAME: Final = 48  # characters of a name before a colon; longer is prose, and digits are a value
BEGINNING: Final = 200  # characters that tell a text from others
MAX_LINE: Final = 300  # characters; a longer line is never cut out of its paragraph
_REMEMBERED_LINES: Final = 20_000
_LINE: Final = re.compile(r"[^\n]*\n|[^\n]+")
_HEADING: Final = re.compile(r"(#{1,6})[ \t]+(\S.*)")
_FENCE: Final = re.compile(r" {0,3}(```|~~~)")
_OPEN: Final = re.compile(r"<([A-Za-z_][\w.:-]{0,63})(?:\s[^<>]*)?(?<!/)>")
_CLOSE: Final = re.compile(r"</([A-Za-z_][\w.:-]{0,63})>\s*$")
_NAME: Final = re.compile(
    rf"\s*(?:[-*+>] |\d{{1,3}}[.)] )?[*_`\"']{{0,3}}([^\W\d_][^:.!?\d\n]{{0,{MAX_NAME - 1}}}):(?!//)"
    r"[*_`\"']{0,3}[ \t]*"
)
_MAY_CHANGE: Final = re.compile(r"\d|^x-|branch", re.IGNORECASE)
_DEEPEST: Final = 6
_ALONE_BEFORE: Final = re.compile(r"[^a-z]|$")  # prose that goes on begins with a small letter
_ALONE_AFTER: Final = re.compile(r"\W{0,8}$")


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a text, and the white space `gap` between it and the next one.

    `unit` numbers the units of the text from 0; blocks of one unit need not be neighbours. Pieces of one
    element share its slot. `under`: the heading or tag that it stands under, if any. `label`: how many
    characters at its start are its name, and do not change in its slot. `volatile`: it is a line that
    holds a volatile span. `edge`: it closes the text, whatever else moves.
    """

    text: str = field(repr=False)
    gap: str = field(repr=False)
    slot: bytes
    unit: int
    under: str = field(default="", repr=False)
    label: int = 0
    volatile: bool = False
    edge: bool = False


def joined(blocks: Sequence[Block]) -> str:
    """The text that the blocks are."""
    return "".join(part for block in blocks for part in (block.text, block.gap))


def contents_of(text: str) -> Iterator[str]:
    """What a new order of blocks leaves as it is: the lines that say something, and how long the text is."""
    yield from (line.rstrip() for line in text.split("\n") if line.strip())
    yield f"\n{len(text)}"  # no line holds a line feed


@dataclass(frozen=True, slots=True)
class _Volatile:
    """A line with a volatile span: its name, the characters of its label, whether it makes sense alone."""

    name: str
    label: int
    alone: bool


_STABLE_LINE: Final = _Volatile("", 0, False)


class Splitter:
    """Splits texts, and remembers which lines hold volatile spans."""

    def __init__(self, lines: int = _REMEMBERED_LINES) -> None:
        self._lines: Recent[str, _Volatile] = Recent(lines)
        self._beginnings: Recent[str, str] = Recent(lines // 10)
        self._slots: Recent[tuple[str, ...], bytes] = Recent(lines)

    def split(self, text: str, place: str = "") -> tuple[Block, ...]:
        """The blocks of a text in order; `place` tells the texts of one head apart."""
        return tuple(_named(_Parser(text, self._volatile).parse(), place, self._slot))

    def beginning(self, blocks: Sequence[Block]) -> str:
        """How a text begins, without what changes.

        Its first names, up to a block that has none: that one's first two lines, unless it stands under a
        heading, where anything may stand.
        """
        parts: list[str] = []
        for block in blocks:
            if block.volatile or not block.text or _OPEN.fullmatch(block.text):
                continue
            if block.under.startswith("<"):
                parts += () if block.under in parts else (block.under,)
            elif block.label:
                parts.append(block.text[: block.label].rstrip())
            else:
                parts += () if block.under else ("\n".join(block.text.split("\n", 2)[:2]),)
                break
        lines = "\n".join(parts)[:BEGINNING]
        known = self._beginnings.get(lines)
        if known is None:
            known = masked(lines, find_volatile(lines))
            self._beginnings.put(lines, known)
        return known

    def _slot(self, key: tuple[str, ...]) -> bytes:
        slot = self._slots.get(key)
        if slot is None:
            name = "\0".join(key).encode("utf-8", "surrogatepass")
            slot = blake2b(name, digest_size=SLOT_BYTES, person=b"ctxgate slot").digest()
            self._slots.put(key, slot)
        return slot

    def _volatile(self, line: str) -> _Volatile | None:
        """What is known of a line that holds a volatile span; None where it holds none."""
        if len(line) > MAX_LINE:
            return None
        known = self._lines.get(line)
        if known is None:
            known = _volatile_line(line) if _MAY_CHANGE.search(line) else _STABLE_LINE
            self._lines.put(line, known)
        return known if known.name else None


def _volatile_line(line: str) -> _Volatile:
    spans = find_volatile(line)
    if not spans:
        return _STABLE_LINE
    before, after = line[: spans[0].start].strip(), line[spans[-1].end :].rstrip()
    alone = bool(_ALONE_BEFORE.match(before) and _ALONE_AFTER.match(after))
    named = _NAME.match(line, 0, spans[0].start)
    if named:  # the same whether or not the detector knows what stands behind it
        return _Volatile(named[1].strip(), named.end(), alone)
    label = spans[0].start if len(before) <= MAX_NAME else 0
    return _Volatile(f"{before[:MAX_NAME]}[{spans[0].kind.value}]", label, alone)


@dataclass(slots=True)
class _Found:
    """A block in the making. `path`: the heading or tag it stands under. `name`: None where it has none."""

    lines: list[str]
    unit: int
    path: str
    name: str | None
    label: int = 0
    volatile: bool = False
    edge: bool = False


class _Parser:
    """Reads a text line by line. One use."""

    def __init__(self, text: str, volatile: Callable[[str], _Volatile | None]) -> None:
        self._lines: list[str] = _LINE.findall(text)
        self._fenced = _fenced(self._lines)
        self._volatile = volatile
        self._found: list[_Found] = []
        self._units = 0
        self._level = 0  # of the heading whose section we are in; 0: in none
        self._path = ""
        self._unit: int | None = None  # of the section or paragraph we are in
        self._joins = False  # whether a plain line joins the last block

    def parse(self) -> list[_Found]:
        start, stop = self._inside()
        ends = _elements(self._lines, self._fenced, start, stop)
        title = self._title(ends, start, stop)
        at = 0
        while at < len(self._lines):
            if not start <= at < stop and self._lines[at].strip():
                self._found.append(_Found([self._lines[at]], self._new_unit(), "", "", edge=at >= stop))
                self._joins = False
            elif at in ends:
                tag, end = ends[at]
                self._element(tag, at, end)
                at = end
            else:
                self._line(at, title)
            at += 1
        return self._found

    def _inside(self) -> tuple[int, int]:
        """The lines inside an element that is all of the text, else all lines."""
        filled = [at for at, line in enumerate(self._lines) if line.strip()]
        if filled and self._lines[filled[0]].startswith("<"):
            ends = _elements(self._lines, self._fenced, filled[0], filled[-1] + 1)
            if filled[0] in ends and ends[filled[0]].end == filled[-1] > filled[0]:
                return filled[0] + 1, filled[-1]
        return 0, len(self._lines)

    def _title(self, ends: dict[int, _Element], start: int, stop: int) -> int | None:
        """The line of a heading that the text begins with, above deeper ones: those are its sections."""
        first: tuple[int, int] | None = None
        at = next((at for at in range(start, stop) if self._lines[at].strip()), stop)
        if at in ends or at in self._fenced or (at < stop and not _HEADING.match(self._lines[at])):
            return None
        while at < stop:
            found = None if at in ends or at in self._fenced else _HEADING.match(self._lines[at])
            if found:
                level = len(found[1])
                if first:
                    return first[0] if level > first[1] else None
                first = at, level
            at = ends[at].end + 1 if at in ends else at + 1
        return None

    def _line(self, at: int, title: int | None) -> None:
        line, fenced = self._lines[at], at in self._fenced
        if not line.strip() and not fenced:
            self._blank(line)
            return
        heading = None if fenced else _HEADING.match(line)
        volatile = self._volatile(line)
        if heading:
            name, label = heading[2].strip(), len(line)
            if volatile:
                name, label = volatile.name, volatile.label
            level = len(heading[1])
            if self._level == 0 or level <= self._level:
                self._level = _DEEPEST if at == title else level
                self._path, self._unit = name, self._new_unit()
            self._begin(line, self._current(), name, label)
        elif volatile:
            unit = self._new_unit() if volatile.alone and not fenced else self._current()
            self._found.append(_Found([line], unit, self._path, volatile.name, volatile.label, volatile=True))
            self._joins = False
        elif self._joins:
            self._found[-1].lines.append(line)
        else:
            found = _NAME.match(line)
            name, label = (found[1].strip(), found.end()) if found else (None, 0)
            self._begin(line, self._current(), name, label)

    def _element(self, tag: str, start: int, end: int) -> None:
        """One unit: volatile lines are blocks of their own, the rest is one slot in one or more pieces."""
        path, joins = f"<{tag}>", False
        unit = self._new_unit()
        for line in self._lines[start : end + 1]:
            volatile = None if start == end else self._volatile(line)
            if volatile:
                self._found.append(_Found([line], unit, path, volatile.name, volatile.label, volatile=True))
            elif joins:
                self._found[-1].lines.append(line)
            else:
                self._found.append(_Found([line], unit, path, path))
            joins = not volatile
        self._blank("")

    def _blank(self, line: str) -> None:
        """A blank line ends a paragraph; it belongs to the block before it."""
        self._joins = False
        if self._level == 0:
            self._unit = None
        if self._found:
            self._found[-1].lines.append(line)
        elif line:
            self._begin(line, self._current(), None, 0)

    def _begin(self, line: str, unit: int, name: str | None, label: int) -> None:
        self._found.append(_Found([line], unit, self._path, name, label))
        self._joins = True

    def _current(self) -> int:
        if self._unit is None:
            self._unit = self._new_unit()
        return self._unit

    def _new_unit(self) -> int:
        self._units += 1
        return self._units - 1


def _fenced(lines: Sequence[str]) -> frozenset[int]:
    """The lines of fenced code, the fences included."""
    found: set[int] = set()
    fence: str | None = None
    for at, line in enumerate(lines):
        mark = _FENCE.match(line)
        if fence is not None or mark:
            found.add(at)
        if mark and fence is None:
            fence = mark[1]
        elif mark and mark[1] == fence:
            fence = None
    return frozenset(found)


class _Element(NamedTuple):
    """An element's tag, and the line that it ends with."""

    tag: str
    end: int


def _elements(lines: Sequence[str], fenced: frozenset[int], start: int, stop: int) -> dict[int, _Element]:
    """The outermost elements among the lines, by the line that each begins with."""
    closing: dict[str, list[int]] = {}
    for at in range(start, stop):
        close = _CLOSE.search(lines[at]) if at not in fenced and "</" in lines[at] else None
        if close:
            closing.setdefault(close[1], []).append(at)
    found: dict[int, _Element] = {}
    at = start
    while at < stop:
        tag = _OPEN.match(lines[at]) if at not in fenced and lines[at].startswith("<") else None
        name = tag[1] if tag else ""
        ends = closing.get(name, [])
        next_end = bisect_left(ends, at)
        if next_end < len(ends):
            found[at] = _Element(name, ends[next_end])
            at = ends[next_end]
        at += 1
    return found


def _named(
    found: Sequence[_Found], place: str, slot_of: Callable[[tuple[str, ...]], bytes]
) -> Iterator[Block]:
    """The blocks with their slots. Equal names under one heading are told apart by their number."""
    counts: Counter[tuple[str, str]] = Counter()
    last, behind = "", 0
    element = -1  # the unit of the element we are in, whose pieces share a slot
    for each in found:
        piece = each.name == each.path and each.path.startswith("<")
        if each.name is None:
            behind += 1
            key = (each.path, last, f"+{behind}")
        else:
            counts[each.path, each.name] += not piece or each.unit != element
            last, behind = each.name, 0
            key = (each.path, each.name, str(counts[each.path, each.name]))
        element = each.unit if piece else element
        whole = "".join(each.lines)
        text = whole.rstrip()
        label = min(each.label, len(text))
        yield Block(
            text,
            whole[len(text) :],
            slot_of((place, *key)),
            each.unit,
            each.path,
            label,
            each.volatile,
            each.edge,
        )
