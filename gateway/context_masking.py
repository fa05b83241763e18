"""Masking for one request: the sizes of its messages, and which of them stay whole."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from ctxgate.compression.cut import pinned
from ctxgate.compression.masked_record import Made, masked_record, masking_of
from ctxgate.compression.masking import NOTICE_TOKENS, mask
from ctxgate.compression.said import Said, read_said
from ctxgate.gateway.context_sizes import KNOWN_SPREAD
from ctxgate.inference.lengths import measure
from ctxgate.inference.record import Record

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ctxgate.compression.ask import Text
    from ctxgate.compression.compaction import Compaction
    from ctxgate.compression.dialects.chat import Facts
    from ctxgate.compression.window import Reason
    from ctxgate.gateway.context_sizes import Lengths
    from ctxgate.gateway.context_turn import Turn

T = TypeVar("T")

BIG_BYTES: Final = 2**18
"""Bodies above it are looked at in a thread."""

_TRIES: Final = 3  # to leave out so much that what is carried for it fits as well
_RULES_SHARE: Final = 4  # of the room for the prompt, for the rules of the user that are carried
_KEPT_SHARE: Final = 4  # of the tail that is kept, for notes and the results of sticky tools


class Tokens(Record, frozen=True):
    """The tokens of each of the client's messages, in the measure of the whole prompt.

    `media`: by message, those of what is no text in it.
    """

    each: Sequence[int]
    media: Mapping[int, int]


NO_TOKENS: Final = Tokens((), {})


async def message_tokens(turn: Turn, lengths: Lengths) -> Tokens:
    """What they are now. Counted in a thread where there are many."""
    calibration, scale = lengths.of(turn.model.name), turn.scale(lengths)
    sizes = lengths.sizes(turn.facts, turn.laid.items("messages"))

    def counted() -> Tokens:
        tokens = [math.ceil(calibration.tokens(size) * scale) for size in sizes]
        media = {
            at: round(calibration.tokens(size.of_media()) * scale)
            for at, size in enumerate(sizes)
            if size.media
        }
        return Tokens(tokens, media)

    return await in_thread(turn, counted)


async def in_thread(turn: Turn, work: Callable[[], T]) -> T:
    """The result of work that takes time for each message; in a thread where a request is big."""
    return await asyncio.to_thread(work) if len(turn.laid.raw) > BIG_BYTES else work()


def other_tokens(turn: Turn, lengths: Lengths) -> int:
    """Tokens of what is no message of the client: the tools, and an earlier compaction's carrier."""
    size = turn.tools
    if turn.record is not None:
        size = size.plus(measure(turn.record.carrier))
    return math.ceil(lengths.of(turn.model.name).tokens(size) * turn.scale(lengths))


class Goal(Record, frozen=True):
    """What a masking aims at: about `target` tokens, at most `limit`, the last `tail` untouched; and why."""

    target: int
    tail: int
    limit: int | None
    reason: Reason


def keep_of(turn: Turn, tokens: Sequence[int], facts: Sequence[Facts]) -> set[int]:
    """The messages that stay whole beside those that always do: see `cut.pinned`.

    `facts` are those of the client's messages, marks included.
    """
    sticky = turn.context.sticky_tools
    said = [_said(each, turn.messages[at], sticky=bool(sticky)) for at, each in enumerate(facts)]
    return pinned(said, tokens, sticky=sticky, ceiling=turn.context.tail_tokens // _KEPT_SHARE)


def _said(facts: Facts, message: Text, *, sticky: bool) -> Said:
    """As much of a message as a pin depends on; only few are decoded."""
    if facts.marked or (sticky and facts.calls):
        return read_said(message)
    return Said(facts.role, answers=facts.answers)


async def masked(turn: Turn, lengths: Lengths, facts: Sequence[Facts], goal: Goal) -> Compaction | None:
    """The record of a masking; None where nothing more can be left out. `facts`: see `keep_of`."""
    other = other_tokens(turn, lengths)
    room = max(goal.target - other, 1)
    most = None if goal.limit is None else max(round(goal.limit * (1 - KNOWN_SPREAD)) - other, room)
    ratio = turn.bytes_per_token(lengths)
    calibration, scale = lengths.of(turn.model.name), turn.scale(lengths)
    counted = 0 if turn.record is None else calibration.tokens(measure(turn.record.carrier))
    tokens = await message_tokens(turn, lengths)
    keep: set[int] = set()

    def made(more: int) -> tuple[Compaction | None, int]:
        """The record if the carrier needs `more` tokens than are counted with, and how many it does."""
        masking = mask(
            turn.facts,
            tokens.each,
            target=max(room - more, 1),
            tail_tokens=goal.tail,
            keep=keep,
            before=masking_of(turn.record, ratio),
            limit=None if most is None else max(most - more, 1),
            media=tokens.media,
        )
        rules = int(max(most or room, room) // _RULES_SHARE * ratio)
        why = Made(goal.reason.value, masking.tokens + other, ratio, rules)
        record = masked_record(masking, turn.record, turn.messages, turn.hashes, turn.reference, why)
        if record is None or not record.carrier:
            return record, 0
        carried = calibration.tokens(measure(record.carrier)) - counted
        beyond = max(math.ceil(carried * scale) - NOTICE_TOKENS, 0)
        return msgspec.structs.replace(record, tokens=record.tokens + beyond), beyond

    def work() -> Compaction | None:
        keep.update(keep_of(turn, tokens.each, facts))
        given, (record, more) = 0, made(0)
        for _ in range(_TRIES):
            if record is None or more <= given or record.tokens <= goal.target:
                break
            given, (record, more) = more, made(more)
        return record

    return await in_thread(turn, work)
