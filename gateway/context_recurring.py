"""What is known of a conversation, for requests that share only a beginning of the one before.

Some clients end each request with a reminder that the next one lacks, or write their newest messages anew
once more has come. Nothing that is kept under the whole request would then be found again, so it is kept
under the beginnings that are likely to recur as well.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import msgspec

from ctxgate.compression.recent import Recent
from ctxgate.inference.record import Record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ctxgate.compression.compaction import Compaction
    from ctxgate.compression.dialects.chat import Facts
    from ctxgate.gateway.context_sizes import Lengths
    from ctxgate.gateway.context_terms import Known
    from ctxgate.gateway.context_turn import Turn

REMEMBERED: Final = 10_000
_FIRST_PAUSE: Final = 4  # passes that are left out after one that could not be used; then twice as many
_LONGEST_PAUSE: Final = 256
_OF_THE_MODEL: Final = frozenset({"assistant", "tool"})


def beginnings(facts: Sequence[Facts], least: int) -> list[int]:
    """How many messages a later request may share, if not all of them: the longest first.

    Those are the ones without what follows the last round, the ones up to the newest answer of the model,
    and the ones in front of it. None is shorter than `least`.
    """
    whole = len(facts)
    round_end = whole
    while round_end and facts[round_end - 1].role not in _OF_THE_MODEL:
        round_end -= 1
    answer = round_end
    while answer and facts[answer - 1].role != "assistant":
        answer -= 1
    lengths = dict.fromkeys((round_end, answer, answer - 1))
    return [each for each in lengths if max(least, 1) <= each < whole]


def places(turn: Turn) -> list[int]:
    """The lengths under whose chain hashes something is kept: the whole request, and its `beginnings`."""
    least = 0 if turn.record is None else turn.record.covers
    return [len(turn.facts), *beginnings(turn.facts, least)]


def shortened(known: Known, turn: Turn, length: int, lengths: Lengths) -> Known:
    """What is known of the first `length` messages of a request, from what was measured of all of it."""
    behind = turn.size_from(length, lengths)
    estimate = lengths.of(turn.model.name).tokens(behind) * turn.scale(lengths)
    less = min(round(estimate), known.tokens - 1)
    state = known.state
    return msgspec.structs.replace(
        known,
        length=length,
        tokens=known.tokens - less,
        said=known.said.minus(behind),
        state=replace(state, tokens=max(state.tokens - less, 0), grown=max(state.grown - less, 0)),
        estimated=True,
    )


class _Pass(Record, frozen=True):
    anchor: bytes
    covers: int
    pause: int
    left: int


class Unused:
    """Passes that a conversation could not use, because it no longer begins as it did then.

    The conversation is known by its first message of the user and by an answer of the model that the pass
    left out, wherever what stands before them has changed. After each pass in vain, more and more are left
    out before the next.
    """

    def __init__(self) -> None:
        self._passes: Recent[tuple[str, bytes, bytes], _Pass] = Recent(REMEMBERED)

    def holds_back(self, turn: Turn) -> bool:
        """Whether the next pass is to be left out; counts it as left out then."""
        key, found = self._of(turn)
        if key is None or found is None or found.left == 0:
            return False
        self._passes.put(key, msgspec.structs.replace(found, left=found.left - 1))
        return True

    def made(self, turn: Turn, record: Compaction) -> None:
        """Note a pass that was made and kept."""
        _, before = self._of(turn)
        pause = _FIRST_PAUSE if before is None else min(2 * before.pause, _LONGEST_PAUSE)
        at = next((at for at in reversed(range(record.covers)) if turn.facts[at].role == "assistant"), 0)
        key = (turn.tenant, _task(turn), turn.facts[at].lasting)
        self._passes.put(key, _Pass(record.anchor, record.covers, pause, pause))

    def _of(self, turn: Turn) -> tuple[tuple[str, bytes, bytes] | None, _Pass | None]:
        """The newest pass for this conversation, if the request cannot go out under it."""
        task = _task(turn)
        answers = (each for each in reversed(turn.facts) if each.role == "assistant")
        keys = ((turn.tenant, task, each.lasting) for each in answers)
        key = next(self._passes.known(keys), None)
        found = None if key is None else self._passes.get(key)
        if found is None or found.anchor in turn.hashes[found.covers - 1 : found.covers]:
            return None, None
        return key, found


def _task(turn: Turn) -> bytes:
    return next((each.lasting for each in turn.facts if each.role == "user"), b"")
