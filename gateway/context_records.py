"""The compactions of conversations, as they are kept in the store of first-seen forms.

A conversation's records stand in slots counted from 0, each claimed once and never changed: whoever claims
a slot that another process has claimed is given that one's record. A process reads each slot once, and asks
in every turn for the next one. What it remembers of a slot is its anchor; the records themselves, which may
be long, have a memory of their own and are read again where they are no longer in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from ctxgate.compression.ask import Ask
from ctxgate.compression.compaction import chosen, decode, encode, slot_key
from ctxgate.compression.recent import Recent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ctxgate.compression.ask import Asking
    from ctxgate.compression.compaction import Compaction

REMEMBERED_BYTES: Final = 64 * 2**20
"""Of records; and as much again of slots."""

MOST_SLOTS: Final = 4096
"""Records of one root, which many runs of one agent may share. When they are used up, what is left out is
decided anew in each request."""

_MOST_AT_ONCE: Final = 64
_COUNTED: Final = 100_000
_OVERHEAD: Final = 400  # bytes of a record beside its carrier
_OF_AN_INDEX: Final = 100  # and for each place it names
_OF_A_SLOT: Final = 200


@dataclass(frozen=True, slots=True)
class Slots:
    """The slots of a root: how many are taken, and the last one with each anchor."""

    count: int = 0
    last: Mapping[bytes, int] = field(default_factory=dict, repr=False)

    def with_next(self, records: Sequence[Compaction | None]) -> Slots:
        """These and the next ones; None stands for one that this code cannot read."""
        numbered = enumerate(records, self.count)
        last = {record.anchor: number for number, record in numbered if record is not None}
        return Slots(self.count + len(records), {**self.last, **last})

    def chosen(self, hashes: Sequence[bytes]) -> int | None:
        """The slot with the longest anchor that the request holds; of two, the later."""
        last = self.last
        return next((last[each] for each in reversed(hashes) if each in last), None) if last else None


_NO_SLOTS: Final = Slots()


class Records:
    """What one process has read of the slots; its contents save reads and never change a result."""

    def __init__(self) -> None:
        self._counted: Recent[bytes, bool] = Recent(_COUNTED)
        self.forget()

    def forget(self) -> None:
        """Know nothing any more, so that what is in use is asked for again and the store keeps it."""
        self._slots: Recent[bytes, Slots] = Recent(REMEMBERED_BYTES, _weight_of_slots)
        self._records: Recent[bytes, Compaction] = Recent(REMEMBERED_BYTES, weight)

    def known(self, root: bytes, hashes: Sequence[bytes]) -> Compaction | None:
        """The record that counts for a request with these chain hashes, as far as it is remembered."""
        number = (self._slots.get(root) or _NO_SLOTS).chosen(hashes)
        record = None if number is None else self._records.get(slot_key(root, number))
        return None if record is None else chosen([record], hashes)

    def read(self, root: bytes, hashes: Sequence[bytes]) -> Asking[Compaction | None]:
        """The record that counts for such a request: one question, unless there are new ones."""
        records = self._records  # what is forgotten meanwhile stays forgotten
        slots = yield from self._all_slots(root)
        number = slots.chosen(hashes)
        if number is None:
            return None
        key = slot_key(root, number)
        record = records.get(key)
        if record is None:
            answer = yield Ask({}, [key])
            record = decode(answer.get(key, b""))
            if record is None:
                return None
            records.put(key, record)
        return chosen([record], hashes)

    def claim(
        self,
        root: bytes,
        record: Compaction,
        hashes: Sequence[bytes],
        counts: Callable[[Compaction], bool] = lambda _: True,
    ) -> Asking[Compaction | None]:
        """Put a record into the next free slot.

        Returns the record itself, or one that another process has put there first and that is now the one
        for a request with these chain hashes, if it `counts`: then the caller decides anew. Those of other
        forks are passed by. None where no slot is left.
        """
        memory, records = self._slots, self._records
        text, known = encode(record), memory.get(root)
        slots = (yield from self._all_slots(root)) if known is None else known
        while slots.count < MOST_SLOTS:
            number = slots.count
            key = slot_key(root, number)
            answer = yield Ask({key: text})
            first = record if answer[key] == text else decode(answer[key])
            slots = slots.with_next([first])
            _learn(memory, root, slots)
            if first is None:
                continue
            records.put(key, first)
            if first == record or (slots.chosen(hashes) == number and counts(first)):
                return first
        return None

    def key_of(self, root: bytes, record: Compaction) -> bytes | None:
        """The key under which a record is kept, as far as it is remembered."""
        number = (self._slots.get(root) or _NO_SLOTS).last.get(record.anchor)
        return None if number is None else slot_key(root, number)

    def is_new(self, root: bytes, record: Compaction) -> bool:
        """Whether this process hears of a record for the first time: equal requests make equal ones."""
        name = blake2b(root + encode(record), digest_size=16).digest()
        if self._counted.get(name):
            return False
        self._counted.put(name, True)
        return True

    def _all_slots(self, root: bytes) -> Asking[Slots]:
        memory, records = self._slots, self._records
        slots, step = memory.get(root) or _NO_SLOTS, 1
        while slots.count < MOST_SLOTS:
            step = min(step, MOST_SLOTS - slots.count)
            keys = [slot_key(root, slots.count + each) for each in range(step)]
            answer = yield Ask({}, keys)
            taken = [key for key in keys if key in answer]
            if taken:
                found = [decode(answer[key]) for key in taken]
                for key, record in zip(taken, found, strict=True):
                    if record is not None:
                        records.put(key, record)
                slots = slots.with_next(found)
                _learn(memory, root, slots)
            if len(taken) < step:
                break
            step = min(4 * step, _MOST_AT_ONCE)
        return slots


def _learn(memory: Recent[bytes, Slots], root: bytes, slots: Slots) -> None:
    """Remember slots, unless more are known by now."""
    if (memory.get(root) or _NO_SLOTS).count < slots.count:
        memory.put(root, slots)


def _weight_of_slots(slots: Slots) -> int:
    return _OF_A_SLOT * (len(slots.last) + 2)


def weight(record: Compaction | None) -> int:
    """About the bytes of memory that a record takes, and what refers to it."""
    if record is None:
        return _OVERHEAD
    places = len(record.dropped) + len(record.masked) + len(record.split)
    return _OVERHEAD + len(record.carrier) + _OF_AN_INDEX * places
