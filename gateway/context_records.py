"""The compactions of conversations, as they are kept in the store of first-seen forms.

A conversation's records stand in slots counted from 0, each claimed once and never changed: whoever claims
a slot that another process has claimed is given that one's record. A process reads each slot once, and asks
in every turn for the next one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from ctxgate.compression.ask import Ask
from ctxgate.compression.compaction import decode, encode, slot_key
from ctxgate.compression.recent import Recent

if TYPE_CHECKING:
    from ctxgate.compression.ask import Asking
    from ctxgate.compression.compaction import Compaction

REMEMBERED_BYTES: Final = 64 * 2**20
MOST_SLOTS: Final = 4096
"""Records of one root, which many runs of one agent may share. When they are used up, what is left out is
decided anew in each request."""

_MOST_AT_ONCE: Final = 64
_OVERHEAD: Final = 400

Slots: TypeAlias = "tuple[Compaction | None, ...]"
"""The records of a root in the order of their slots; None for one that this code cannot read."""


class Records:
    """What one process has read of the slots; its contents save reads and never change a result."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Know nothing any more, so that what is in use is asked for again and the store keeps it."""
        self._known: Recent[bytes, Slots] = Recent(REMEMBERED_BYTES, _weight)

    def known(self, root: bytes) -> list[Compaction]:
        """The records that were read."""
        return [record for record in self._known.get(root) or () if record is not None]

    def read(self, root: bytes) -> Asking[list[Compaction]]:
        """All records of a root: one question, unless there are new ones."""
        known = self._known.get(root) or ()
        step = 1
        while len(known) < MOST_SLOTS:
            keys = [slot_key(root, len(known) + each) for each in range(step)]
            answer = yield Ask({}, keys)
            found = [decode(answer[key]) for key in keys if key in answer]
            known = (*known, *found)
            if len(found) < step:
                break
            step = min(4 * step, _MOST_AT_ONCE)
        self._known.put(root, known)
        return [record for record in known if record is not None]

    def claim(self, root: bytes, record: Compaction) -> Asking[Compaction | None]:
        """Put a record into the next free slot.

        Returns the record itself, or the one that another process has put there first: then it is known
        from now on, and the caller decides anew. None where no slot is left.
        """
        known = self._known.get(root) or ()
        if len(known) >= MOST_SLOTS:
            return None
        key, text = slot_key(root, len(known)), encode(record)
        answer = yield Ask({key: text})
        first = record if answer[key] == text else decode(answer[key])
        self._known.put(root, (*known, first))
        return first


def _weight(slots: Slots) -> int:
    return _OVERHEAD + sum(len(each.carrier) + _OVERHEAD for each in slots if each is not None)
