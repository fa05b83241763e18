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
figures). Frozen notes that the client's own edits have made too many are left out, from the first one on
that is too much.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from ctxgate.compression.ask import Ask
from ctxgate.compression.chain import HASH_BYTES
from ctxgate.compression.moved import HEADING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ctxgate.compression.ask import Asking
    from ctxgate.compression.dialects.chat import Facts
    from ctxgate.compression.moved import Moved
    from ctxgate.compression.recent import Recent

SHARE: Final = 100  # frozen notes may make a prompt longer by a part in so many
FLOOR: Final = 512  # bytes that they may take in any prompt
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
    tail: int,
    hashes: Sequence[bytes],
    known: Recent[bytes, Said],
    wrapping: Callable[[int], int],
) -> Asking[tuple[Note, ...]]:
    """The notes of a request, in order. `before`: the facts of its messages as they came.

    `tail` is the message that ends the last user turn, `hashes` the chain hashes of `moved.facts`;
    `wrapping` is how many bytes stand around a note in a message.
    """
    said, unread = _remembered(moved.facts, tail, hashes, known)
    if unread:
        answer = yield Ask({note_key(hashes[at]): _NOTHING for at in unread})
        for at in unread:
            said = _extended(said, at, answer[note_key(hashes[at])])
            known.put(hashes[at], said)
    room = _Room(before, moved, wrapping)
    repeated = START
    for each in said.all():
        if not room.take(each.message, each.text(), FLOOR):
            break
        repeated = each
    changed = _changed(moved, repeated)
    text = note_text(line for _, _, line in changed)
    earlier = repeated.all()
    # The first note holds every line, and most of them for good: it may take twice the room.
    slack = 0 if earlier else FLOOR
    fits = not changed or (len(earlier) < KEPT and room.take(tail, text, slack))
    record = _packed(changed) if fits else _NOTHING
    kept = known.get(hashes[tail])
    if kept is None:
        answer = yield Ask({note_key(hashes[tail]): record})
        kept = _extended(said, tail, answer[note_key(hashes[tail])])
        known.put(hashes[tail], kept)
    found = [Note(each.message, each.text(), frozen=True, new=False) for each in earlier]
    if changed:
        frozen = kept.message == tail and list(kept.lines) == changed
        found.append(Note(tail, text, frozen=frozen, new=True))
    return tuple(found)


class _Room:
    """How much longer a prompt has become, prefix by prefix; asked for one prefix after the other."""

    def __init__(self, before: Sequence[Facts], moved: Moved, wrapping: Callable[[int], int]) -> None:
        self._wrapping = wrapping
        self._sizes = list(accumulate(facts.size for facts in before))
        self._changes = [(at, moved.facts[at].size - before[at].size) for at in sorted(moved.texts)]
        self._passed = 0
        self._grown = 0

    def take(self, message: int, text: str, slack: int) -> bool:
        """Whether a note more at this message leaves the prefix up to it within bounds; if so it counts."""
        while self._passed < len(self._changes) and self._changes[self._passed][0] <= message:
            self._grown += self._changes[self._passed][1]
            self._passed += 1
        grown = self._grown + len(text.encode()) + self._wrapping(message)
        if grown > max(self._sizes[message] // SHARE, FLOOR) + slack:
            return False
        self._grown = grown
        return True


def _remembered(
    facts: Sequence[Facts], tail: int, hashes: Sequence[bytes], known: Recent[bytes, Said]
) -> tuple[Said, list[int]]:
    """What the longest remembered prefix before the tail says, and the messages behind it to ask for."""
    unread: list[int] = []
    for at in range(tail - 1, -1, -1):
        if not _may_end_a_turn(facts, at):
            continue
        said = known.get(hashes[at])
        if said is not None:
            return said, unread[::-1]
        unread.append(at)
    return START, unread[::-1]


def _may_end_a_turn(facts: Sequence[Facts], at: int) -> bool:
    """Whether an earlier request can have ended here: results of one batch come together."""
    role = facts[at].role
    return role == "user" or (role == "tool" and facts[at + 1].role != "tool")


def tail_of(facts: Sequence[Facts]) -> int | None:
    """The message that ends the last user turn: the last one of a user or a tool."""
    for at in range(len(facts) - 1, -1, -1):
        if facts[at].role in ("user", "tool"):
            return at
    return None


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
