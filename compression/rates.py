"""How often each slot of an agent's prompts changes, and the order of blocks that this calls for.

Counted per template, as requests come: from turn to turn of one conversation, and from one conversation
to the next. A process knows what it has seen itself; nothing here decides the bytes of a prompt, only
when another order is worth proposing.

A conversation is compared with the most similar of the last few of its template, not with the one just
before: that is the one whose cached prefix it would meet, and two agents that share their first words do
not spoil each other's counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from ctxgate.compression.blocks import SLOT_BYTES
from ctxgate.compression.recent import Recent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Order: TypeAlias = "Mapping[bytes, int]"
"""Where the blocks of a slot go: their rank. Slots that are not named keep their place."""

TAIL: Final = 255  # to the note at the end of the turn
OFTEN: Final = 5  # last of its text: changes within conversations, and is too long for a note
RANKS: Final = 4  # before it: 4 changes in three of four conversations or more, 1 in less than a quarter

MIN_CONVERSATIONS: Final = 2  # with a change, before a slot is thought to change at all
TAIL_SHARE: Final = 50  # one change in so many turns calls for the tail: each costs the whole history
STILL_TURNS: Final = 200  # turns seen before a slot may come back from the tail,
STILL_TAIL_SHARE: Final = 200  # and the share of changes that keeps it there
LATE_SHARE: Final = 4  # one change in so many conversations calls for a later place
DOUBTFUL_CONVERSATIONS: Final = 8  # in which what changed in turns of but one is not moved at all
STILL_CONVERSATIONS: Final = 32  # the same for a slot that may come back to its own place
STILL_LATE_SHARE: Final = 20
MAX_NOTE: Final = 2_000  # characters of a slot that may go to the tail, where each change repeats it
_NOTES: Final = {TAIL: 2 * MAX_NOTE, OFTEN: MAX_NOTE // 2}  # the same for one that is there already
MAX_SLOTS: Final = 1_024  # of a template; a head of more is not counted
COMPARED_HEADS: Final = 8  # latest conversations that a new one is compared with
_SAME_START: Final = 4  # heads remembered of conversations that begin with the same messages
_WINDOW: Final = 256  # comparisons after which older ones count half
_REMEMBERED: Final = 100_000  # slots in all remembered heads, of each kind
_TEMPLATES: Final = 200


class Content(NamedTuple):
    """What a slot holds: a hash of its text, and the text's length in characters."""

    digest: int
    size: int


Head: TypeAlias = "Mapping[bytes, Content]"
"""The slots of one request's head."""


@dataclass(slots=True)
class Counts:
    """One slot of one template. `turns` and `conversations` are comparisons, older ones at half weight."""

    turns: int = 0
    turn_changes: int = 0
    conversations: int = 0
    conversation_changes: int = 0
    changing: int = 0  # conversations in which it changed
    size: int = 0  # characters, at its last change

    def turned(self, *, changed: bool, first: bool) -> None:
        """One more turn compared; `first`: the first change in its conversation."""
        if self.turns >= _WINDOW:
            self.turns //= 2
            self.turn_changes //= 2
        self.turns += 1
        self.turn_changes += changed
        self.changing += first

    def begun(self, *, changed: bool) -> None:
        """One more conversation compared."""
        if self.conversations >= _WINDOW:
            self.conversations //= 2
            self.conversation_changes //= 2
        self.conversations += 1
        self.conversation_changes += changed

    def rank(self, now: int) -> int:
        """Where the slot belongs, now that it is at rank `now`; 0 is its own place.

        It takes more to leave a place than to stay, so that no slot goes to and fro.
        """
        if self.changes_in_turns(now):
            return TAIL if self.size <= _NOTES.get(now, MAX_NOTE) else OFTEN
        if not self._changes_between(0 < now <= RANKS):
            return 0
        wanted = min(RANKS, 1 + RANKS * self.conversation_changes // max(1, self.conversations))
        return now if 0 < now <= RANKS and abs(wanted - now) < 2 else wanted

    def changes_in_turns(self, now: int) -> bool:
        """Whether it changes inside conversations."""
        if now in (TAIL, OFTEN):
            return self.turns < STILL_TURNS or self.turn_changes * STILL_TAIL_SHARE >= self.turns
        return self.changing >= MIN_CONVERSATIONS and self._may_change_in_turns()

    def _may_change_in_turns(self) -> bool:
        return self.turn_changes > 0 and self.turn_changes * TAIL_SHARE >= self.turns

    def _changes_between(self, late: bool) -> bool:
        if late:
            return (
                self.conversations < STILL_CONVERSATIONS
                or self.conversation_changes * STILL_LATE_SHARE >= self.conversations
            )
        if self._may_change_in_turns() and self.conversations < DOUBTFUL_CONVERSATIONS:
            return False  # the next conversation will tell whether it goes to the tail
        return (
            self.conversation_changes >= MIN_CONVERSATIONS
            and self.conversation_changes * LATE_SHARE >= self.conversations
        )


@dataclass(slots=True)
class _Template:
    counts: dict[bytes, Counts] = field(default_factory=dict)
    version: int = 0
    conversations: int = 0  # begun since this version was first met

    def of(self, slot: bytes) -> Counts | None:
        counts = self.counts.get(slot)
        if counts is None and len(self.counts) < MAX_SLOTS:
            counts = self.counts[slot] = Counts()
        return counts


@dataclass(frozen=True, slots=True)
class _Conversation:
    head: Head
    changed: frozenset[bytes] = frozenset()


class Rates:
    """The counts of one process, bounded in memory. Belongs to one event loop."""

    def __init__(self, remembered: int = _REMEMBERED, templates: int = _TEMPLATES) -> None:
        self._templates: Recent[bytes, _Template] = Recent(templates)
        self._latest: Recent[bytes, tuple[Head, ...]] = Recent(remembered, _size)  # by template
        self._starts: Recent[bytes, tuple[Head, ...]] = Recent(remembered, _size)
        self._conversations: Recent[bytes, _Conversation] = Recent(
            remembered, lambda known: _size((known.head,))
        )

    def begin(self, template: bytes, start: bytes, head: Head) -> None:
        """Count the first request of a conversation; `start` names its messages behind the head."""
        known = self._template(template)
        known.conversations += 1
        if len(head) > MAX_SLOTS:
            return
        latest = self._latest.get(template) or ()
        before = _closest(latest, head)
        for slot in () if before is None else {**before, **head}:
            counts = known.of(slot)
            if counts is not None and before is not None:
                counts.begun(changed=head.get(slot) != before.get(slot))
        self._latest.put(template, (*latest[1 - COMPARED_HEADS :], head))
        self._starts.put(start, (*(self._starts.get(start) or ())[1 - _SAME_START :], head))

    def go_on(self, template: bytes, start: bytes, conversation: bytes, head: Head) -> None:
        """Count a later request. `conversation` is the same for all of them, `start` as it was at first."""
        if len(head) > MAX_SLOTS:
            return
        earlier = self._conversations.get(conversation)
        if earlier is None:
            first = _closest(self._starts.get(start) or (), head)
            if first is None:  # its beginning was not seen here: nothing to compare with
                self._conversations.put(conversation, _Conversation(head))
                return
            earlier = _Conversation(first)
        known = self._template(template)
        changed: set[bytes] = set()
        for slot in (*earlier.head, *(slot for slot in head if slot not in earlier.head)):
            now = head.get(slot)
            differs = now != earlier.head.get(slot)
            counts = known.of(slot)
            if counts is not None:
                counts.turned(changed=differs, first=differs and slot not in earlier.changed)
                counts.size = now.size if differs and now is not None else counts.size
            if differs:
                changed.add(slot)
        self._conversations.put(conversation, _Conversation(head, earlier.changed | changed))

    def counts(self, template: bytes) -> Mapping[bytes, Counts]:
        """What is known of a template's slots."""
        known = self._templates.get(template)
        return {} if known is None else known.counts

    def wanted(self, template: bytes, version: int, order: Order) -> Order | None:
        """The order to propose in place of `order`, the template's newest one; None to leave it.

        Every version costs each conversation after it a prompt that is new to the cache, so each takes
        twice as many conversations as the one before.
        """
        known = self._template(template)
        if known.version != version:
            known.version, known.conversations = version, 0
        if version and known.conversations < 2**version:
            return None
        wanted = dict(order)
        for slot, counts in known.counts.items():
            rank = counts.rank(order.get(slot, 0))
            if rank:
                wanted[slot] = rank
            else:
                wanted.pop(slot, None)
        return wanted if wanted != order and len(wanted) <= MAX_SLOTS else None

    def _template(self, template: bytes) -> _Template:
        known = self._templates.get(template)
        if known is None:
            known = _Template()
            self._templates.put(template, known)
        return known


def _size(heads: Sequence[Head]) -> int:
    return 1 + sum(map(len, heads))


def _closest(heads: Sequence[Head], head: Head) -> Head | None:
    """The one with the fewest slots that differ; the latest of several."""
    return min(reversed(heads), key=lambda each: _difference(each, head), default=None)


def _difference(a: Head, b: Head) -> int:
    """How many slots differ."""
    same = sum(b.get(slot) == content for slot, content in a.items())
    return len(a.keys() | b.keys()) - same


def packed(order: Order) -> bytes:
    """An order as bytes, the same for equal orders."""
    return b"".join(slot + bytes((rank,)) for slot, rank in sorted(order.items()))


def unpacked(text: bytes) -> Order:
    """The order that `packed` made these bytes of."""
    step = SLOT_BYTES + 1
    return {text[at : at + SLOT_BYTES]: text[at + SLOT_BYTES] for at in range(0, len(text), step)}
