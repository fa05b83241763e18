"""From what masking decided to the record that makes it hold for every later request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ctxgate.compression.carriers import notice
from ctxgate.compression.compaction import Compaction
from ctxgate.compression.masking import Masking, Split
from ctxgate.inference.record import Record

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ctxgate.compression.ask import Text

BY: Final = "masking"
BYTES_PER_TOKEN: Final = 3.0
"""Bytes that a cut text may have for each token it is allowed, where nothing was measured."""


class Made(Record, frozen=True):
    """Why a masking was made, and the length in tokens that it left.

    A cut text may have `bytes_per_token` for each token it is allowed. `rules` bounds the bytes of the user's
    rules that are carried; None does not.
    """

    reason: str
    tokens: int
    bytes_per_token: float = BYTES_PER_TOKEN
    rules: int | None = None


def masking_of(record: Compaction | None, bytes_per_token: float = BYTES_PER_TOKEN) -> Masking:
    """An earlier record as the masking that a later one builds on."""
    if record is None:
        return Masking((), (), (), 0, fits=True)
    split = tuple(Split(at, round(limit / bytes_per_token)) for at, limit in record.split)
    return Masking(record.masked, record.ranges, split, record.tokens, fits=True)


def masked_record(
    masking: Masking,
    before: Compaction | None,
    messages: Sequence[Text],
    hashes: Sequence[bytes],
    reference: Callable[[bytes], str],
    made: Made,
) -> Compaction | None:
    """The record of a masking; None where it adds nothing to the one before.

    `messages` are the client's, with the chain hash after each.
    """
    old = {} if before is None else dict(before.split)
    split = tuple((each.at, _limit(each, old.get(each.at), made.bytes_per_token)) for each in masking.split)
    dropped = tuple((each.start, each.stop) for each in masking.dropped)
    if before is not None and (dropped, masking.masked, split) == (
        before.dropped,
        before.masked,
        before.split,
    ):
        return None
    reach = [*(stop for _, stop in dropped), *(at + 1 for at in masking.masked), *(at + 1 for at, _ in split)]
    if not reach:
        return None
    covers = max(*reach, 0 if before is None else before.covers)
    anchor = hashes[covers - 1]
    name = reference(anchor)
    gone = [messages[at] for start, stop in dropped for at in range(start, stop)]
    earlier, noticed = b"", ""
    if before is not None:
        earlier, noticed = before.carrier, before.reference if before.by == BY else ""
    carrier = notice(name, gone, earlier, reference_before=noticed, room=made.rules) if dropped else b""
    return Compaction(
        anchor=anchor,
        covers=covers,
        dropped=dropped,
        masked=masking.masked,
        split=split,
        carrier=carrier,
        reference=name if dropped else "",
        reason=made.reason,
        by=BY,
        tokens=made.tokens,
    )


def _limit(split: Split, before: int | None, bytes_per_token: float) -> int:
    limit = int(split.tokens * bytes_per_token)
    return limit if before is None else min(limit, before)
