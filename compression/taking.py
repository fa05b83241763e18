"""Level `declared`: text that is declared volatile leaves its place, and a placeholder stays.

What is taken:

- of the head (the leading system and developer messages): what the policy's kinds and expressions find,
  but for parts that the client marks `stable`;
- anywhere: parts that the client marks `volatile` (see `marks`). They are taken wherever they stand and
  from their first sight on, the last user turn included: taking them only once they are history would
  change what has been sent. Their words come back at the end of the message, or of a later one, as part
  of a note (`notes`).

The gateway's own marks are taken off as well; `cache_control` goes upstream as it came. What a message
becomes depends on the policy, the message and what stands before it without volatile text, so it is the
same in every turn. Where moving would make the prompt too long (`growth`), or the first user turn can hold
no note, text stays; the facts are those without it all the same, for they name the conversation.

A text that holds one of the constants of `moved` stays as it is: nobody could tell which was whose.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import xxhash

from ctxgate.compression.declared_spans import Sections, Span, declared, grouped
from ctxgate.compression.growth import head_size, staying
from ctxgate.compression.marks import Marks, Stability, read_marks
from ctxgate.compression.moved import HEADING, PLACEHOLDER, Moved, Passage
from ctxgate.compression.plan import PlanEdit
from ctxgate.compression.recent import Recent
from ctxgate.compression.texts import GATEWAY_MARK, MARKS, MessageTexts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import msgspec

    from ctxgate.compression.declared_spans import Group
    from ctxgate.compression.dialects.chat import Facts, Views
    from ctxgate.compression.policy import Policy

MARKED: Final = "marked"
_REMEMBERED: Final = 32 * 2**20  # bytes of messages after taking


@dataclass(frozen=True, slots=True)
class Taken:
    """One message without its volatile text. `text` is None where it goes out as it came.

    `cost`: bytes by which the message and its lines of a note grow, whatever the words are.
    """

    text: bytes | None
    facts: Facts
    passages: tuple[tuple[tuple[str, ...], str, int], ...] = ()  # words, the line of the note, its cost
    kinds: tuple[str, ...] = ()
    cost: int = 0

    def size(self) -> int:
        """Bytes that it takes to remember, roughly."""
        return 500 + len(self.text or b"") + sum(len(line) for _, line, _ in self.passages)


class TakingMemory:
    """What one process remembers to save work; its contents never change a result."""

    def __init__(self, views: Views, seed: int = 0) -> None:
        self.views = views
        self.seed = seed
        self.sections = Sections()
        self.taken: Recent[tuple[object, ...], Taken] = Recent(_REMEMBERED, Taken.size)
        self.marks: Recent[tuple[bytes, str], Marks] = Recent(10_000)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a message stands: its index, whether in the head, how many of its parts a cache mark covers."""

    index: int
    head: bool
    cached: int


def check_marks(
    messages: Sequence[msgspec.Raw], facts: Sequence[Facts], memory: TakingMemory
) -> dict[int, Marks]:
    """The marks of the messages that bear any. Raises `MarkError` naming the field at fault."""
    found: dict[int, Marks] = {}
    for at, each in enumerate(facts):
        if not each.marked:
            continue
        key = (each.digest, each.role)
        marks = memory.marks.get(key)
        if marks is None:
            message = MessageTexts.read(messages[at])
            marks = Marks() if message is None else read_marks(message, each.role, f"messages[{at}]")
            memory.marks.put(key, marks)
        found[at] = marks
    return found


def take(
    messages: Sequence[msgspec.Raw],
    facts: tuple[Facts, ...],
    tenant: str,
    policy: Policy,
    memory: TakingMemory,
    *,
    movable: bool = True,
) -> Moved:
    """The prompt without what is declared volatile. Raises `MarkError`.

    `movable`: whether there is a place for notes; without one only marks are taken off.
    """
    marks = check_marks(messages, facts, memory)
    head = head_size(facts)
    searched = head if policy.kinds or policy.patterns else 0
    covered = max((at for at in range(head) if at in marks and marks[at].cached), default=-1)
    kept, found = list(facts), dict[int, Taken]()
    places = {at: _place(at, head, covered, marks) for at in sorted({*range(searched), *marks})}
    for at, place in places.items():
        found[at] = taken = _remembered(messages[at], place, tenant, policy, memory)
        kept[at] = taken.facts
    costs = {at: taken.cost for at, taken in found.items() if taken.passages}
    too_long = staying(kept, costs) if movable else frozenset[int]()
    for at in too_long if movable else costs:
        found[at] = _remembered(messages[at], places[at], tenant, policy, memory, movable=False)
    return Moved(
        facts=tuple(kept),
        texts={at: taken.text for at, taken in found.items() if taken.text is not None},
        passages=tuple(Passage(at, *each) for at, taken in found.items() for each in taken.passages),
        reasons=tuple(
            PlanEdit(f"messages[{at}]", _reason(taken))
            for at, taken in found.items()
            if taken.text is not None
        ),
        staying=too_long,
    )


def _place(at: int, head: int, covered: int, marks: Mapping[int, Marks]) -> Place:
    """Where a message stands. `covered` is the last one of the head that bears a cache mark."""
    cached = 0
    if at <= covered:
        cached = 2**31 if at < covered else marks[at].cached
    return Place(at, at < head, cached)


def _reason(taken: Taken) -> str:
    if not taken.passages:
        return "the gateway's marks taken off"
    return f"volatile text ({', '.join(taken.kinds)}) moved to the note of the last user turn"


def _remembered(
    raw: msgspec.Raw,
    place: Place,
    tenant: str,
    policy: Policy,
    memory: TakingMemory,
    *,
    movable: bool = True,
) -> Taken:
    digest = xxhash.xxh3_128_digest(memoryview(raw), memory.seed)
    key = (tenant, digest, policy, place.head, place.cached, movable)
    taken = memory.taken.get(key)
    if taken is None:
        taken = _taken(raw, place, tenant, policy, memory, movable=movable)
        memory.taken.put(key, taken)
    return taken


def _taken(
    raw: msgspec.Raw, place: Place, tenant: str, policy: Policy, memory: TakingMemory, *, movable: bool
) -> Taken:
    facts = memory.views.message(tenant, raw)
    message = MessageTexts.read(raw)
    if message is None:
        return Taken(None, facts)
    marks = read_marks(message, facts.role, f"messages[{place.index}]") if facts.marked else Marks()
    passages: list[tuple[tuple[str, ...], str, int]] = []
    kinds: dict[str, None] = {}
    for at, text in [*message.texts()] if movable else []:
        said = marks.parts[at] if marks.parts else None
        spans = _spans(text, said, place, at, policy, memory.sections)
        if not spans or HEADING in text or PLACEHOLDER in text:
            continue
        kinds |= dict.fromkeys(span.kind for span in spans)
        before = 0
        for group in grouped(text, spans):
            words = tuple(text[span.start : span.end] for span in group.spans)
            passages.append((words, group.line(text), _cost(text, group, before)))
            before = group.spans[-1].end
        message.put(at, _without(text, spans))
    unmarked = message.unmark(GATEWAY_MARK)
    sent = message.raw() if passages or unmarked else None
    if facts.marked:
        cached = message.unmark(*MARKS)
        known = memory.views.message(tenant, message.raw())
        # Where a cache mark stands is not part of the conversation, and first forms must not move it.
        facts = replace(known, varies=known.varies and not cached)
    elif sent is not None:
        facts = memory.views.message(tenant, sent)
    return Taken(sent, facts, tuple(passages), tuple(kinds), sum(cost for _, _, cost in passages))


def _cost(text: str, group: Group, before: int) -> int:
    """What it costs to move a group, apart from its words. `before`: where the last group ended.

    Counts constant text alone, so that it is the same whatever the words are.
    """
    first, last = group.spans[0].start, group.spans[-1].end
    label = text[max(first - len(group.label), before) : first].lstrip()
    words = sum(len(text[span.start : span.end].encode()) for span in group.spans)
    between = len(text[first:last].encode()) - words
    return len(PLACEHOLDER) * len(group.spans) + len(label.encode()) + between + 1


def _spans(
    text: str, said: Stability | None, place: Place, at: int, policy: Policy, known: Sections
) -> list[Span]:
    """What leaves one text."""
    if said is Stability.VOLATILE:
        return [Span(0, len(text), MARKED)] if text.strip() else []
    if said is Stability.STABLE or not place.head or at < place.cached:
        return []
    return declared(text, policy, known)


def _without(text: str, spans: Sequence[Span]) -> str:
    parts: list[str] = []
    position = 0
    for span in spans:
        parts += (text[position : span.start], PLACEHOLDER)
        position = span.end
    return "".join((*parts, text[position:]))
