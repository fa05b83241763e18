"""Notes: the current words of what left its place, at the end of the last user turn.

A note ends the last user or tool message of a prompt, so that everything before it is what the engine
has read already. It begins with a constant heading and holds one line for each passage whose words are
not what an earlier note of the conversation said last.

    request 1   S U [note: 10:00]
    request 2   S U [note: 10:00] A T [note: 10:01]
    request 3   S U [note: 10:00] A T [note: 10:01] A T            nothing changed: no note

Each request must extend the one before. So a note is *frozen* when it is first sent: it is claimed under
the chain hash of the conversation up to its message (a hash that no volatile word and no note is part
of), and every later request repeats it there byte for byte, from any process. "No note here" is claimed
as well, or a request that was sent twice could put a note where later ones have none.

Where no message of the last turn can hold a note, what earlier ones say stands, and what has changed since
waits for the next turn; only what none has said yet goes further back, for otherwise it would be lost.

What is true whatever a client does:

- the first request with a prefix decides what later ones repeat in it; a retry whose clock has moved on
  carries its own time in its own note, and what follows repeats the first one's;
- a client that edits its history falls back to the prefix that it shares;
- passages are known by message and order, so what an environment block of an old turn said is not said
  again, and is when it changes.

A frozen note is read again in every later turn. One that is not frozen is read once, but then the engine
computes the answer behind it again, whose place in the prompt has moved. Frozen notes may make a prompt
longer by 1 % or by FLOOR bytes, whichever is more (the first one by FLOOR more), and there are at most
KEPT; beyond that the newest note is sent and not frozen (docs/decisions/0010-notes-at-the-tail.md has the
figures). What is frozen stays, however few words of the head there are in other turns. Only where a client
has cut marked text out of its history, so that the notes of it would more than double what is left and be
longer than STALE, are they left out, from the first one on that is too much.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from ctxgate.compression.ask import Ask
from ctxgate.compression.chain import HASH_BYTES
from ctxgate.compression.growth import FLOOR, SHARE, TAKING_ROLES, first_turn, head_size
from ctxgate.compression.moved import HEADING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ctxgate.compression.ask import Asking
    from ctxgate.compression.dialects.chat import Facts
    from ctxgate.compression.moved import Moved
    from ctxgate.compression.recent import Recent

STALE: Final = 2**14  # bytes that notes of an earlier, longer prompt may take in any case
KEPT: Final = 128  # of one conversation; who went on for so long will go on too long to read each again
Slot: TypeAlias = "tuple[int, int]"
"""Which passage: its message, and which one of that message's."""
Line: TypeAlias = "tuple[int, int, str]"
"""A slot, and what a note says of it."""

_LINES: Final = msgspec.json.Decoder(list[tuple[int, int, str]])
_NOTHING: Final = b""


@dataclass(frozen=True, slots=True)
class Note:
    """A note to put at the end of a message. `frozen`: later requests repeat it; `new`: this one made it."""

    message: int
    text: str = field(repr=False)
    frozen: bool
    new: bool


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request's newest note goes: the message `tail` of its last turn, None where that has no place.

    `ends`: whether nothing of the last turn stands behind that message. `spare`: the last message of all
    that can hold a note.
    """

    tail: int | None
    spare: int
    ends: bool = True


@dataclass(frozen=True, slots=True)
class Placed:
    """The notes of a request, one per message. `waiting`: what they say in the words of an earlier turn."""

    notes: tuple[Note, ...]
    waiting: frozenset[Slot] = frozenset()


@dataclass(frozen=True, slots=True)
class Said:
    """What the notes of a prefix say: the last one and, through `before`, all earlier ones."""

    message: int
    lines: tuple[Line, ...] = field(repr=False)
    before: Said | None = field(repr=False)

    def size(self) -> int:
        """Bytes that it takes to remember, roughly."""
        return 200 + sum(len(line) for _, _, line in self.lines)

    def text(self) -> str:
        """The note as it is sent."""
        return note_text(line for _, _, line in self.lines)

    def all(self) -> list[Said]:
        """Every note of the prefix, the first one first."""
        found: list[Said] = []
        said: Said | None = self
        while said is not None and said.lines:
            found.append(said)
            said = said.before
        return found[::-1]


START: Final = Said(-1, (), None)
"""A prefix without notes."""


def note_text(lines: Iterable[str]) -> str:
    """A note of these lines."""
    return "\n".join((HEADING, *lines))


def note_key(here: bytes) -> bytes:
    """The key under which the note is kept that ends the prefix with this chain hash."""
    return blake2b(here, digest_size=HASH_BYTES, person=b"ctxgate note").digest()


def notes(
    before: Sequence[Facts],
    moved: Moved,
    place: Place,
    hashes: Sequence[bytes],
    known: Recent[bytes, Said],
    wrapping: Callable[[int], int],
) -> Asking[Placed]:
    """The notes of a request. `before`: the facts of its messages as they came.

    `hashes` are the chain hashes of `moved.facts`; `wrapping` is how many bytes stand around a note in a
    message.
    """
    tail = place.tail
    said, unread = _remembered(moved.facts, len(hashes) if tail is None else tail, hashes, known)
    if unread:
        answer = yield Ask({note_key(hashes[at]): _NOTHING for at in unread})
        for at in unread:
            said = _extended(said, at, answer[note_key(hashes[at])])
            known.put(hashes[at], said)
    room = _Room(before, moved, wrapping)
    repeated = START
    for each in said.all():
        if not room.keep(each):
            break
        repeated = each
    changed, earlier = _changed(moved, repeated), repeated.all()
    if tail is None:
        return _without_tail(earlier, changed, place)
    text = note_text(line for _, _, line in changed)
    # The first note holds every line, and most of them for good: it may take twice the room.
    slack = 0 if earlier else FLOOR
    fits = not changed or (len(earlier) < KEPT and room.take(tail, text, slack))
    record = _packed(changed) if fits else _NOTHING
    kept = known.get(hashes[tail])
    if kept is None:
        answer = yield Ask({note_key(hashes[tail]): record})
        kept = _extended(said, tail, answer[note_key(hashes[tail])])
        known.put(hashes[tail], kept)
    own = kept.message == tail
    if not place.ends and (own or fits) and _packed(kept.lines if own else ()) != record:
        # An earlier request ended with this message: what stands there has been read with what follows.
        last = Said(tail, kept.lines, repeated) if own else repeated
        return _without_tail(last.all(), _changed(moved, last), place)
    found = [_repeated(each) for each in earlier]
    if changed:
        found.append(Note(tail, text, frozen=own and list(kept.lines) == changed, new=True))
    return Placed(tuple(found))


def _repeated(said: Said) -> Note:
    return Note(said.message, said.text(), frozen=True, new=False)


def _without_tail(earlier: Sequence[Said], changed: Sequence[Line], place: Place) -> Placed:
    """The notes of a request whose end takes none: what earlier ones said, and what none has said yet.

    A line that is new moves the last turn's end this once, for nothing else would tell the model. One
    that an earlier note says in other words waits for the next turn.
    """
    spoken = {line[:2] for each in earlier for line in each.lines}
    new = [line for line in changed if line[:2] not in spoken]
    found = {each.message: _repeated(each) for each in earlier}
    if new:
        lines = [line for each in earlier if each.message == place.spare for line in each.lines]
        text = note_text(line for _, _, line in (*lines, *new))
        found[place.spare] = Note(place.spare, text, frozen=False, new=True)
    return Placed(tuple(found.values()), frozenset(line[:2] for line in changed if line[:2] in spoken))


class _Room:
    """How much longer a prompt has become, prefix by prefix; asked for one prefix after the other."""

    def __init__(self, before: Sequence[Facts], moved: Moved, wrapping: Callable[[int], int]) -> None:
        self._wrapping = wrapping
        self._sizes = list(accumulate(facts.size for facts in before))
        left = sorted({passage.message for passage in moved.passages})
        self._changes = [(at, moved.facts[at].size - before[at].size) for at in left]
        self._head = head_size(before)
        self._passed = 0
        self._grown = 0

    def take(self, message: int, text: str, slack: int) -> bool:
        """Whether a note more at this message leaves the prefix up to it within bounds; if so it counts."""
        return self._add(message, text, max(self._sizes[message] // SHARE, FLOOR) + slack)

    def keep(self, said: Said) -> bool:
        """The same for a note that was sent: it stays, unless a client has cut away what it speaks of.

        Words of the head come and go (a list of files), and were not longer than the head when they were
        sent. A note that says nothing else is never left out.
        """
        of_head = all(message < self._head for message, _, _ in said.lines)
        bound = None if of_head else max(self._sizes[said.message], STALE)
        return self._add(said.message, said.text(), bound)

    def _add(self, message: int, text: str, bound: int | None) -> bool:
        while self._passed < len(self._changes) and self._changes[self._passed][0] <= message:
            self._grown += self._changes[self._passed][1]
            self._passed += 1
        grown = self._grown + len(text.encode()) + self._wrapping(message)
        if bound is not None and grown > bound:
            return False
        self._grown = grown
        return True


def _remembered(
    facts: Sequence[Facts], tail: int, hashes: Sequence[bytes], known: Recent[bytes, Said]
) -> tuple[Said, list[int]]:
    """What the longest remembered prefix before the tail says, and the messages behind it to ask for."""
    unread: list[int] = []
    for at in range(tail - 1, -1, -1):
        if facts[at].role not in TAKING_ROLES:
            continue
        said = known.get(hashes[at])
        if said is not None:
            return said, unread[::-1]
        unread.append(at)
    return START, unread[::-1]


def place_of(facts: Sequence[Facts], takes: Callable[[int], bool]) -> Place | None:
    """Where a request's note goes; `takes`: whether a message has a place for one. None: in no message.

    The last turn is what stands behind the last answer; an answer that the client has begun does not end
    it. A prompt whose first user turn has no place gets no notes, then or ever: what left its place in the
    first request would be lost.
    """
    first = first_turn(facts)
    if first is None or not takes(first):
        return None
    end = len(facts)
    while facts[end - 1].role == "assistant":
        end -= 1
    tail: int | None = None
    for at in range(end - 1, first - 1, -1):
        if facts[at].role == "assistant":
            break
        if facts[at].role in TAKING_ROLES and takes(at):
            tail = at
            break
    if tail is not None:
        return Place(tail, tail, ends=tail == end - 1)
    return Place(
        None, next(at for at in range(end - 1, -1, -1) if facts[at].role in TAKING_ROLES and takes(at))
    )


def _changed(moved: Moved, said: Said) -> list[Line]:
    """The lines of passages that do not say what was last said of them."""
    last: dict[Slot, str] = {}
    for each in said.all():
        last |= {(message, number): line for message, number, line in each.lines}
    counts: dict[int, int] = {}
    found: list[Line] = []
    for passage in moved.passages:
        number = counts.get(passage.message, 0)
        counts[passage.message] = number + 1
        if last.get((passage.message, number)) != passage.line:
            found.append((passage.message, number, passage.line))
    return found


def _packed(lines: Sequence[Line]) -> bytes:
    return msgspec.json.encode(lines) if lines else _NOTHING


def _extended(said: Said, at: int, record: bytes) -> Said:
    """A prefix with one more place, where a record says what its note is."""
    return Said(at, tuple(_LINES.decode(record)), said) if record else said
