"""What a vLLM engine tells of its cache blocks: messages of its event stream, decoded.

A message has three frames: topic, sequence number (8 bytes, big-endian), and a MessagePack batch, an array
`[time, [event, ...], rank]`. An event is a map with `type` (vLLM since June 2026) or an array that begins
with its type, its fields in the order in which the engine declares them. Fields that are not known are
passed over. A type that is not known, and a batch that cannot be read, are never taken for silence: the
first is counted, the second raises `Undecodable`.

Hashes are the low 64 bits of the engine's, as it sends them unless it is told to send bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import msgspec

from ctxgate.inference.record import Record

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    """

    events: tuple[Event, ...]
    unknown: int = 0
    remote: int = 0
    rank: int | None = None


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
    try:
        read = _BATCH.decode(batch)
        events: list[Event] = []
        unknown = remote = 0
        for raw in read.events:
            event, is_remote = _event(raw)
            if is_remote:
                remote += 1
            elif event is None:
                unknown += 1
            else:
                events.append(event)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise Undecodable(f"a batch that cannot be read ({type(error).__name__})") from None
    return Batch(tuple(events), unknown, remote, read.data_parallel_rank)


def _event(raw: msgspec.Raw) -> tuple[Event | None, bool]:
    """The event, None for one of a type that is not known; and whether it is of another machine."""
    view = memoryview(raw)
    is_map = view.nbytes > 0 and view[0] in _MAP
    kind = (_TYPED if is_map else _TYPED_ARRAY).decode(view).type
    if kind == _STORED:
        stored = _STORED_MAP.decode(view) if is_map else _STORED_ARRAY.decode(view)
        return _stored(stored), stored.locality == _REMOTE
    if kind == _REMOVED:
        removed = _REMOVED_MAP.decode(view) if is_map else _REMOVED_ARRAY.decode(view)
        event = Removed(_numbers(removed.block_hashes), removed.medium or DEVICE, removed.group_idx or 0)
        return event, removed.locality == _REMOTE
    return (Cleared() if kind == _CLEARED else None), False


def _stored(told: _StoredMap | _StoredArray) -> Stored:
    parent = told.parent_block_hash
    return Stored(
        _numbers(told.block_hashes),
        None if parent is None else _number(parent),
        told.block_size,
        told.medium or DEVICE,
        told.session_id,
        told.group_idx or 0,
    )


def _numbers(hashes: list[Any]) -> tuple[int, ...]:
    return tuple(map(_number, hashes))


def _number(told: int | bytes) -> int:
    """The low 64 bits of a hash, in either form."""
    return int.from_bytes(told[-8:], "big") if isinstance(told, bytes) else told & _LOW
