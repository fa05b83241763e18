"""What a vLLM engine tells of its cache blocks: messages of its event stream, decoded.

A message has three frames: topic, sequence number (8 bytes, big-endian), and a MessagePack batch, an array
`[time, [event, ...], rank]`. An event is a map with `type` (vLLM since June 2026) or an array that begins
with its type, its fields in the order in which the engine declares them. Fields that are not known are
passed over. A type that is not known, and a batch that cannot be read, are never taken for silence: the
first is counted, the second raises `Undecodable`.

Hashes are the low 64 bits of the engine's, as it sends them unless it is told to send bytes.
"""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import msgspec

from ctxgate.inference.record import Record

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SLICE: Final = 512
"""The blocks that are read in one go; a step of an engine that computes 8192 tokens has as many."""

DEVICE: Final = "GPU"
"""The tier that an engine computes with; its CPU build calls it so too."""

END: Final = b"\xff" * 8
"""The sequence number of the last answer to a request for a replay."""

_SEQUENCE_BYTES: Final = 8
_LOW: Final = 2**64 - 1
_REMOTE: Final = "REMOTE"
_STORED: Final = "BlockStored"
_REMOVED: Final = "BlockRemoved"
_CLEARED: Final = "AllBlocksCleared"
_MAP: Final = frozenset({*range(0x80, 0x90), 0xDE, 0xDF})
"""The first byte of a map in MessagePack."""
_STARTS: Final = {kind: msgspec.msgpack.encode({"type": kind})[1:] for kind in (_STORED, _REMOVED, _CLEARED)}
"""What follows the first byte of a small map that begins with its type."""


class Undecodable(Exception):
    """A message that is no batch of events; the text says what is wrong and holds none of its content."""


class Stored(Record, frozen=True):
    """Blocks that follow one another entered the cache, the first one behind `parent` (None: a beginning).

    `block` is the tokens of each, `tier` where they lie, `session` the `X-Session-ID` of the request that
    stored them. `hashes` may be empty: full blocks of which none is kept. What parts caches (salt, adapter,
    images) is part of every hash. `group`: of which of the model's caches they are part.
    """

    hashes: tuple[int, ...]
    parent: int | None
    block: int
    tier: str
    session: str | None = None
    group: int = 0


class Removed(Record, frozen=True):
    """One copy of each of these blocks left a tier."""

    hashes: tuple[int, ...]
    tier: str
    group: int = 0


class Cleared(Record, frozen=True):
    """All blocks left the cache."""


Event: TypeAlias = Stored | Removed | Cleared


class Batch(Record, frozen=True):
    """The events of one step of the engine. `unknown` counts those of a type that is not known here.

    `remote` counts events about blocks of another machine, which say nothing of this one's cache.
    A large step comes in slices, each a batch: `first` and `last` tell where in the step a slice stands.
    """

    events: tuple[Event, ...]
    unknown: int = 0
    remote: int = 0
    rank: int | None = None
    first: bool = True
    last: bool = True


class Message(Record, frozen=True):
    """One message of a stream: its number, and its batch as it came. `batch` is None for a replay's end."""

    sequence: int
    batch: bytes | None


_Tokens: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=2**31)]


class _StoredMap(msgspec.Struct, frozen=True):
    block_hashes: list[int | bytes]
    block_size: _Tokens
    parent_block_hash: int | bytes | None = None
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    session_id: str | None = None


class _RemovedMap(msgspec.Struct, frozen=True):
    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class _StoredArray(msgspec.Struct, frozen=True, array_like=True):
    type: str
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: msgspec.Raw
    block_size: _Tokens
    lora_id: msgspec.Raw = msgspec.Raw(b"\xc0")
    medium: str | None = None
    lora_name: msgspec.Raw = msgspec.Raw(b"\xc0")
    extra_keys: msgspec.Raw = msgspec.Raw(b"\xc0")
    group_idx: int | None = None
    kv_cache_spec_kind: msgspec.Raw = msgspec.Raw(b"\xc0")
    kv_cache_spec_sliding_window: msgspec.Raw = msgspec.Raw(b"\xc0")
    locality: str | None = None
    ownership: msgspec.Raw = msgspec.Raw(b"\xc0")
    session_id: str | None = None


class _RemovedArray(msgspec.Struct, frozen=True, array_like=True):
    type: str
    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class _Typed(msgspec.Struct, frozen=True):
    type: str


class _TypedArray(msgspec.Struct, frozen=True, array_like=True):
    type: str


class _Batch(msgspec.Struct, frozen=True, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


_BATCH: Final = msgspec.msgpack.Decoder(_Batch)
_TYPED: Final = msgspec.msgpack.Decoder(_Typed)
_TYPED_ARRAY: Final = msgspec.msgpack.Decoder(_TypedArray)
_STORED_MAP: Final = msgspec.msgpack.Decoder(_StoredMap)
_REMOVED_MAP: Final = msgspec.msgpack.Decoder(_RemovedMap)
_STORED_ARRAY: Final = msgspec.msgpack.Decoder(_StoredArray)
_REMOVED_ARRAY: Final = msgspec.msgpack.Decoder(_RemovedArray)


def message(frames: Sequence[bytes]) -> Message:
    """A message of the live stream, or an answer to a replay without its empty first frame.

    Raises `Undecodable` for anything but three frames with a sequence number in the second.
    """
    if len(frames) != 3 or len(frames[1]) != _SEQUENCE_BYTES:
        raise Undecodable(f"a message of {len(frames)} frames, not topic, sequence number and batch")
    if frames[1] == END:
        return Message(-1, None)
    return Message(int.from_bytes(frames[1], "big"), frames[2])


def replay_request(start: int) -> tuple[bytes, bytes]:
    """The frames that ask for all batches from the number `start` on: an empty one and 8 bytes."""
    return b"", start.to_bytes(_SEQUENCE_BYTES, "big")


def decode(batch: bytes) -> Batch:
    """The events of a batch, in order. Raises `Undecodable` where it, or a known type's fields, are wrong."""
    (whole,) = slices(batch, sys.maxsize)
    return whole


def slices(batch: bytes, most: int = SLICE) -> Iterator[Batch]:
    """The events of a batch, in order, in slices of fewer than twice `most` blocks and events.

    Blocks that follow one another may be cut: the next slice goes on behind the last one. It is read as it
    is asked for. Raises `Undecodable` where what comes next cannot be read; what came before it is then void
    too, since nobody knows what else the batch told of.
    """
    try:
        read = _BATCH.decode(batch)
        now, rank = _Slice(), read.data_parallel_rank
        first = True
        for raw in read.events:
            for event in _pieces(raw, most):
                if now.work >= most:
                    yield now.batch(rank, first=first, last=False)
                    now, first = _Slice(), False
                now.add(event)
        yield now.batch(rank, first=first, last=True)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise Undecodable(f"a batch that cannot be read ({type(error).__name__})") from None


class _Skipped(StrEnum):
    """Why an event is left out."""

    UNKNOWN = "unknown"
    REMOTE = "remote"


class _Slice:
    """Collects a slice."""

    def __init__(self) -> None:
        self.work = 0
        self._events: list[Event] = []
        self._skipped: list[_Skipped] = []

    def add(self, event: Event | _Skipped) -> None:
        self.work += 1
        if isinstance(event, _Skipped):
            self._skipped.append(event)
            return
        self._events.append(event)
        if not isinstance(event, Cleared):
            self.work += len(event.hashes)

    def batch(self, rank: int | None, *, first: bool, last: bool) -> Batch:
        unknown = self._skipped.count(_Skipped.UNKNOWN)
        remote = len(self._skipped) - unknown
        return Batch(tuple(self._events), unknown, remote, rank, first, last)


def _pieces(raw: msgspec.Raw, most: int) -> Iterator[Event | _Skipped]:
    """An event, in pieces of at most so many blocks."""
    view = memoryview(raw)
    is_map = view.nbytes > 0 and view[0] in _MAP
    kind = _kind(view, is_map=is_map)
    if kind == _STORED:
        stored = _STORED_MAP.decode(view) if is_map else _STORED_ARRAY.decode(view)
        yield from (_Skipped.REMOTE,) if stored.locality == _REMOTE else _stored(stored, most)
    elif kind == _REMOVED:
        removed = _REMOVED_MAP.decode(view) if is_map else _REMOVED_ARRAY.decode(view)
        yield from (_Skipped.REMOTE,) if removed.locality == _REMOTE else _removed(removed, most)
    else:
        yield Cleared() if kind == _CLEARED else _Skipped.UNKNOWN


def _kind(view: memoryview, *, is_map: bool) -> str:
    """The type of an event. Mostly it stands first, and the rest, a long prompt's tokens, is not read."""
    for kind, starts in _STARTS.items():
        if is_map and view[1 : 1 + len(starts)] == starts:
            return kind
    return (_TYPED if is_map else _TYPED_ARRAY).decode(view).type


def _stored(told: _StoredMap | _StoredArray, most: int) -> Iterator[Stored]:
    parent = None if told.parent_block_hash is None else _number(told.parent_block_hash)
    block, tier, group = told.block_size, told.medium or DEVICE, told.group_idx or 0
    for hashes in _numbers(told.block_hashes, most):
        yield Stored(hashes, parent, block, tier, told.session_id, group)
        parent = hashes[-1] if hashes else parent


def _removed(told: _RemovedMap | _RemovedArray, most: int) -> Iterator[Removed]:
    for hashes in _numbers(told.block_hashes, most):
        yield Removed(hashes, told.medium or DEVICE, told.group_idx or 0)


def _numbers(hashes: list[int | bytes], most: int) -> Iterator[tuple[int, ...]]:
    """The hashes as numbers, so many at a time; none at all is one time."""
    for start in range(0, len(hashes) or 1, most):
        yield tuple(map(_number, hashes[start : start + most]))


def _number(told: int | bytes) -> int:
    """The low 64 bits of a hash, in either form."""
    return int.from_bytes(told[-8:], "big") if isinstance(told, bytes) else told & _LOW
