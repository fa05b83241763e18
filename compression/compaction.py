"""One compaction of a conversation: a record that says what its later prompts leave out, and its effect.

A record is decided once and holds for ever. It is kept in the store of first-seen forms under the next free
slot of the conversation's root, and applies to every request that begins with the messages up to its
anchor: from any process, after a restart, and in every fork behind the anchor. A client that edits its
history falls back to the record with the longest prefix that it still sends. The same record and the same
messages give the same bytes.

What a record says of messages is made by code: `dropped` ranges are left out, with one `carrier` message
where the first of them began; of `masked` messages one line is left; the texts of `split` ones lose their
middle.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec
import xxhash

from ctxgate.compression.chain import HASH_BYTES
from ctxgate.compression.cut import Range, head_length, stands, still_stands
from ctxgate.compression.masking import masked_message
from ctxgate.compression.recent import Recent
from ctxgate.compression.splitting import split_message
from ctxgate.inference.record import Record
from ctxgate.inference.wire import Edit

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from ctxgate.compression.ask import Text
    from ctxgate.compression.dialects.chat import Facts
    from ctxgate.inference.frame import Span

VERSION: Final = 1
REMEMBERED_BYTES: Final = 64 * 2**20  # of masked and split messages
_OVERHEAD: Final = 200

Ranges: TypeAlias = "tuple[tuple[int, int], ...]"
"""Messages from the first index up to, but not with, the second; in order, never touching."""


class Compaction(Record, frozen=True):
    """What is left out of a conversation from now on.

    `anchor` is the chain hash after the first `covers` messages: all that the record depends on. Indexes
    are those of the client's messages. `split` holds (index, longest text in bytes). `carrier` is the JSON
    of the message in place of the first dropped range, empty where nothing is dropped; `reference` the id
    it names. `by` says who wrote it (`warm_suffix`, `extractive` or `masking`), `reason` why, `tokens` the
    length in tokens that it left.
    """

    anchor: bytes
    covers: int
    dropped: Ranges = ()
    masked: tuple[int, ...] = ()
    split: Ranges = ()
    carrier: bytes = b""
    reference: str = ""
    reason: str = ""
    by: str = ""
    tokens: int = 0

    @property
    def ranges(self) -> tuple[Range, ...]:
        """The dropped ranges."""
        return tuple(Range(*each) for each in self.dropped)

    def gone(self) -> set[int]:
        """The indexes of the dropped messages."""
        return {at for start, stop in self.dropped for at in range(start, stop)}

    def with_others(self, other: Compaction) -> Compaction | None:
        """This record with what the other one, made at the same time, masks and cuts beside it.

        None where the other drops something that this one keeps: then it must not follow the other.
        """
        gone = self.gone()
        if not other.gone() <= gone:
            return None
        masked = {*self.masked, *other.masked} - gone
        split = {at: limit for at, limit in (*self.split, *other.split) if at not in gone | masked}
        last = max(self, other, key=lambda record: record.covers)
        return msgspec.structs.replace(
            self,
            anchor=last.anchor,
            covers=last.covers,
            masked=tuple(sorted(masked)),
            split=tuple(sorted(split.items())),
        )


_DECODER: Final = msgspec.msgpack.Decoder(
    tuple[
        int,
        bytes,
        int,
        tuple[tuple[int, int], ...],
        tuple[int, ...],
        tuple[tuple[int, int], ...],
        bytes,
        str,
        str,
        str,
        int,
    ]
)


def encode(record: Compaction) -> bytes:
    """The record as it is kept."""
    return msgspec.msgpack.encode((VERSION, *msgspec.structs.astuple(record)))


def decode(text: bytes) -> Compaction | None:
    """A kept record; None where it is none, or of a version that this code does not know."""
    try:
        version, *values = _DECODER.decode(text)
    except msgspec.DecodeError:
        return None
    record = Compaction(*values)  # type: ignore[arg-type]  # checked by the decoder
    return record if version == VERSION and _is_sound(record) else None


def _is_sound(record: Compaction) -> bool:
    at = 0
    for start, stop in record.dropped:
        if not at <= start < stop:
            return False
        at = stop + 1
    stops = [at - 1, *(index + 1 for index in record.masked), *(index + 1 for index, _ in record.split)]
    return len(record.anchor) == HASH_BYTES and max(stops) <= record.covers


def slot_key(root: bytes, number: int) -> bytes:
    """The key of a conversation's record number `number`, counted from 0."""
    name = root + number.to_bytes(8, "big")
    return blake2b(name, digest_size=HASH_BYTES, person=b"ctxgate compact").digest()


def root_of(facts: Sequence[Facts], hashes: Sequence[bytes]) -> bytes:
    """What all turns and forks of a conversation share: the chain hash after its first user message.

    Without one it is that of the leading messages, or of the first message where none leads. Raises
    ValueError where there is no message.
    """
    if not hashes:
        raise ValueError("a conversation without messages has no root")
    first = next((at for at, each in enumerate(facts) if each.role == "user"), None)
    return hashes[max(head_length(facts) - 1, 0) if first is None else first]


def chosen(records: Iterable[Compaction], hashes: Sequence[bytes]) -> Compaction | None:
    """The record that counts: the one with the longest anchor that the request holds; of two, the later."""
    found: Compaction | None = None
    for record in records:
        if 0 < record.covers <= len(hashes) and hashes[record.covers - 1] == record.anchor:
            found = record if found is None or record.covers >= found.covers else found
    return found


def covered(record: Compaction, facts: Sequence[Facts], since: int = 0) -> bool:
    """Whether the record can be applied to these messages, which begin as those it was made for.

    What has come since may belong to a round that it drops, such as a late result. `since`: it could be
    applied to so many of the messages; then, as a rule, only those that follow are looked at.
    """
    if since and still_stands(facts, record.ranges, since):
        return True
    gone = record.gone()
    if any(facts[at].role != "tool" for at in record.masked if at not in gone):
        return False
    return not record.dropped or (record.dropped[-1][1] < len(facts) and stands(facts, record.ranges))


class ShapingMemory:
    """What one process remembers of masked and split messages; its contents never change a result."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.texts: Recent[tuple[bytes, int, str], bytes] = Recent(
            REMEMBERED_BYTES, lambda text: len(text) + _OVERHEAD
        )


def texts_of(
    record: Compaction,
    messages: Sequence[Text],
    facts: Sequence[Facts],
    reference: Callable[[bytes], str],
    memory: ShapingMemory,
) -> dict[int, bytes]:
    """By index: the masked and split messages as they go out.

    `messages` are those that would go out without the record. `reference` names an original by the digest
    of what it says (`Facts.lasting`). Raises ValueError for a message that cannot be read.
    """
    gone = record.gone()
    texts = {
        at: _made(messages[at], 0, reference(facts[at].lasting), memory)
        for at in record.masked
        if at not in gone
    }
    texts |= {
        at: _made(messages[at], limit, reference(facts[at].lasting), memory)
        for at, limit in record.split
        if at not in gone and at not in texts
    }
    return texts


def _made(raw: Text, limit: int, reference: str, memory: ShapingMemory) -> bytes:
    """A message masked (limit 0) or split."""
    key = (xxhash.xxh3_128_digest(memoryview(raw), memory.seed), limit, reference)
    text = memory.texts.get(key)
    if text is None:
        text = split_message(raw, limit, reference) if limit else masked_message(raw, reference)
        memory.texts.put(key, text)
    return text


def edits_of(
    spans: Sequence[Span], dropped: Ranges, carrier: bytes, texts: Mapping[int, bytes]
) -> tuple[Edit, ...]:
    """The edits on a body whose messages lie at `spans`.

    Raises ValueError where a range reaches the last message: what a prompt ends with is never left out.
    """
    edits: list[Edit] = []
    gone: set[int] = set()
    for number, (start, stop) in enumerate(dropped):
        if stop >= len(spans):
            raise ValueError("the end of a conversation would be left out")
        gone.update(range(start, stop))
        if number == 0 and carrier:
            edits.append(Edit(spans[start][0], spans[stop - 1][1], carrier))
        else:
            edits.append(Edit(spans[start][0], spans[stop][0], b""))
    edits += (Edit(*spans[at], text) for at, text in texts.items() if at not in gone)
    return tuple(edits)


def newly_left_out(record: Compaction, before: Compaction | None) -> list[int]:
    """The messages that this record drops, masks or splits and the one before it did not, in order."""
    old: Collection[int] = ()
    if before is not None:
        old = before.gone() | {*before.masked} | {at for at, _ in before.split}
    new = record.gone() | {*record.masked} | {at for at, _ in record.split}
    return sorted(new - {*old})


def joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The messages of all ranges, as ranges in order that do not touch."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return tuple(found)
