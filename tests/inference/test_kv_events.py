"""Messages of an event stream, in both shapes that vLLM has published."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ctxgate.inference.kv_events import (
    Batch,
    Cleared,
    Message,
    Removed,
    Stored,
    Undecodable,
    decode,
    message,
    replay_request,
    slices,
)

pack = msgspec.msgpack.encode


def batch(*events: object, rank: object = 0) -> bytes:
    return pack([1700000000.5, list(events), rank])


def stored_map(**more: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [2**64 - 1, 7],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    } | more


def test_routing_c1_maps_and_arrays_say_the_same() -> None:
    named = batch(
        stored_map(extra_keys=[["salt"], None], group_idx=0, session_id="A"),
        {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU", "group_idx": 0},
        {"type": "AllBlocksCleared"},
    )
    keys: list[Any] = [["salt"], None]
    placed = batch(
        [
            "BlockStored",
            [2**64 - 1, 7],
            None,
            [1, 2, 3, 4],
            2,
            None,
            "GPU",
            None,
            keys,
            0,
            None,
            None,
            None,
            None,
            "A",
        ],
        ["BlockRemoved", [7], "GPU", 0],
        ["AllBlocksCleared"],
    )
    expected = (Stored((2**64 - 1, 7), None, 2, "GPU", "A"), Removed((7,), "GPU"), Cleared())
    assert decode(named) == decode(placed) == Batch(expected, rank=0)


def test_routing_c1_an_old_array_without_the_later_fields() -> None:
    placed = batch(["BlockStored", [5], 4, [1, 2], 2, None], ["BlockRemoved", [5]])
    assert decode(placed).events == (Stored((5,), 4, 2, "GPU"), Removed((5,), "GPU"))


def test_routing_c1_unknown_fields_are_passed_over_and_unknown_types_are_counted() -> None:
    named = batch(
        stored_map(colour="red", nested={"a": [1]}), {"type": "BlockMoved", "block_hashes": [1]}, ["Other", 1]
    )
    assert decode(named) == Batch((Stored((2**64 - 1, 7), None, 2, "GPU"),), unknown=2, rank=0)
    longer = ["BlockRemoved", [7], "CPU", 1, "LOCAL", "tier", "a field of a later version"]
    assert decode(batch(longer)).events == (Removed((7,), "CPU", 1),)


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        b"\xc1",
        pack({"not": "an array"}),
        pack([1.0, [{"block_hashes": [1]}], 0]),
        batch({"type": "BlockStored", "block_hashes": "text", "block_size": 2}),
        batch({"type": "BlockRemoved"}),
        batch(["BlockStored", [1]]),
        batch({"type": "BlockStored", "block_hashes": [1], "block_size": 0}),
        batch({"type": "BlockStored", "block_hashes": [1], "block_size": -16}),
        batch(17),
    ],
)
def test_routing_c1_what_cannot_be_read_is_never_silence(broken: bytes) -> None:
    with pytest.raises(Undecodable):
        decode(broken)


def test_slices_tell_the_same_in_order_and_hold_a_bounded_part_each() -> None:
    told = batch(
        stored_map(block_hashes=[*range(1, 11)], parent_block_hash=99, session_id="A"),
        {"block_hashes": [1, 2], "type": "BlockRemoved"},  # its type does not stand first
        *[{"type": "BlockMoved"}] * 3,
        ["BlockRemoved", [3, 4, 5, 6, 7], "GPU"],
        {"type": "AllBlocksCleared"},
    )
    parts = [*slices(told, 4)]
    assert [event for part in parts for event in part.events] == [
        Stored((1, 2, 3, 4), 99, 2, "GPU", "A"),
        Stored((5, 6, 7, 8), 4, 2, "GPU", "A"),
        Stored((9, 10), 8, 2, "GPU", "A"),
        Removed((1, 2), "GPU"),
        Removed((3, 4, 5, 6), "GPU"),
        Removed((7,), "GPU"),
        Cleared(),
    ]
    assert all(sum(1 + len(getattr(event, "hashes", ())) for event in part.events) < 9 for part in parts)
    assert sum(part.unknown for part in parts) == 3
    assert [part.first for part in parts] == [True] + [False] * (len(parts) - 1)
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert len(parts) == 5


def test_what_cannot_be_read_behind_the_first_slice_is_raised_when_it_is_come_to() -> None:
    parts = slices(batch(*[{"type": "AllBlocksCleared"}] * 2, {"type": "BlockRemoved"}), 1)
    assert next(parts).events == (Cleared(),)
    with pytest.raises(Undecodable):
        list(parts)


def test_hashes_that_come_as_bytes_are_the_same_numbers() -> None:
    whole = bytes(range(32))
    low = int.from_bytes(whole[24:], "big")
    told = decode(batch(stored_map(block_hashes=[whole], parent_block_hash=whole))).events[0]
    assert told == Stored((low,), low, 2, "GPU")


def test_routing_c16_no_hash_is_not_no_event() -> None:
    assert decode(batch(stored_map(block_hashes=[]))).events == (Stored((), None, 2, "GPU"),)
    assert decode(batch()).events == ()


def test_another_machines_blocks_are_counted_and_left_out() -> None:
    assert decode(batch(stored_map(locality="REMOTE"))) == Batch((), remote=1, rank=0)


def test_routing_c4_a_replay_is_asked_for_with_an_empty_frame_and_eight_bytes() -> None:
    assert replay_request(258) == (b"", b"\0\0\0\0\0\0\x01\x02")


def test_frames() -> None:
    assert message([b"topic", b"\0\0\0\0\0\0\x01\x02", b"batch"]) == Message(258, b"batch")
    assert message([b"", b"\xff" * 8, b""]) == Message(-1, None)
    for wrong in ([b"", b"\0" * 8], [b"", b"\0" * 7, b"x"], [b"", b"", b"\0" * 8, b"x"]):
        with pytest.raises(Undecodable):
            message(wrong)
