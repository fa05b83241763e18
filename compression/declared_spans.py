"""Which spans of a text the policy declares volatile: by the detector's kinds and by expressions.

Between two requests most of a head is the same text, so that the detector looks at it in sections (split
at blank lines, very long ones at line ends) and remembers what it found in each: a turn whose clock has
moved costs the section with the clock. Expressions may reach over several lines and see the whole text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ctxgate.compression import volatile_context as context
from ctxgate.compression import volatile_patterns as patterns
from ctxgate.compression.recent import Recent
from ctxgate.compression.volatile import VolatileKind, find_volatile

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from ctxgate.compression.policy import Policy

SECTION: Final = 512  # characters after which a section ends at the next blank line
LONG_SECTION: Final = 4096  # after which it ends at the next line end
REMEMBERED: Final = 16 * 2**20  # characters of sections
BY_PATTERN: Final = "pattern"
_GAP: Final = context.REACH  # characters between two spans of one line that a note repeats


@dataclass(frozen=True, slots=True)
class Span:
    """`text[start:end]` is declared volatile. `kind`: the detector's word for it, or `pattern`."""

    start: int
    end: int
    kind: str

    def moved(self, by: int) -> Span:
        """The same span, so many characters later."""
        return Span(self.start + by, self.end + by, self.kind)


@dataclass(frozen=True, slots=True)
class Group:
    """Spans that stand close together on one line (a span may hold line ends itself), and their label."""

    spans: tuple[Span, ...]
    label: str

    def line(self, text: str) -> str:
        """The label and everything from the first span to the last."""
        return self.label + text[self.spans[0].start : self.spans[-1].end]


@dataclass(frozen=True, slots=True)
class _Found:
    spans: tuple[Span, ...]
    numbers: tuple[tuple[str, str], ...]  # numbered words, for they number a list if there are several
    counters: tuple[tuple[int, str], ...]  # start of a counter that a bare word makes one, and the word
    size: int


class Sections:
    """What the detector found in sections of texts; its contents never change a result."""

    def __init__(self, limit: int = REMEMBERED) -> None:
        self._known: Recent[str, _Found] = Recent(limit, lambda found: found.size)

    def find(self, text: str, kinds: Collection[VolatileKind]) -> list[Span]:
        """The spans of these kinds, in order and without overlaps."""
        found: list[Span] = []
        bare: dict[int, str] = {}
        values: dict[str, set[str]] = {}
        position = 0
        for section in sections(text):
            known = self._of(section)
            for word, value in known.numbers:
                values.setdefault(word, set()).add(value)
            for start, word in known.counters:
                bare[position + start] = word
            if known.spans:
                found += (span.moved(position) for span in known.spans if span.kind in kinds)
            position += len(section)
        lists = {word for word, numbers in values.items() if len(numbers) > 1}
        return [
            span for span in found if span.kind != VolatileKind.COUNTER or bare.get(span.start) not in lists
        ]

    def _of(self, section: str) -> _Found:
        found = self._known.get(section)
        if found is None:
            found = _look(section)
            self._known.put(section, found)
        return found


def declared(text: str, policy: Policy, known: Sections) -> list[Span]:
    """What the policy declares volatile in a text, in order; what overlaps or touches is one span."""
    spans = known.find(text, policy.kinds) if policy.kinds else []
    for pattern in policy.patterns:
        spans += (Span(start, end, BY_PATTERN) for start, end in pattern.spans(text))
    merged: list[Span] = []
    for span in sorted(spans, key=lambda each: (each.start, each.end)):
        if merged and span.start <= merged[-1].end:
            last = merged.pop()
            span = Span(last.start, max(last.end, span.end), last.kind)  # noqa: PLW2901 - it grows in place
        merged.append(span)
    return merged


def grouped(text: str, spans: Collection[Span]) -> Iterator[Group]:
    """Spans by the line of a note that will hold them."""
    group: list[Span] = []
    for span in spans:
        if group and (span.start - group[-1].end > _GAP or "\n" in text[group[-1].end : span.start]):
            yield _group(text, group)
            group = []
        group.append(span)
    if group:
        yield _group(text, group)


def _group(text: str, spans: list[Span]) -> Group:
    return Group(tuple(spans), context.before(text, spans[0].start).lstrip())


def sections(text: str) -> Iterator[str]:
    """A text in pieces that join to it: each ends with a blank line, or at a line end when it grows long."""
    start = 0
    while start < len(text):
        blank = text.find("\n\n", start + SECTION)
        end = len(text) if blank < 0 else blank + 2
        if end - start > LONG_SECTION:
            line = text.find("\n", start + LONG_SECTION)
            end = min(end, len(text) if line < 0 else line + 1)
        yield text[start:end]
        start = end


def _look(section: str) -> _Found:
    spans = tuple(Span(span.start, span.end, span.kind.value) for span in find_volatile(section))
    numbers = tuple({(m["word"].lower(), m["value"]) for m in patterns.NUMBERED.finditer(section)})
    counters: tuple[tuple[int, str], ...] = ()
    if any(span.kind == VolatileKind.COUNTER for span in spans):
        counters = tuple(
            (match.start("value"), match["word"].lower())
            for match in patterns.COUNTER.finditer(section)
            if match["word"] and not match["mark"]
        )
    return _Found(spans, numbers, counters, len(section) + 64)
