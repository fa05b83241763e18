"""Which beginnings of a request a later one may share, and how many compactions wait at a replica."""

from __future__ import annotations

import pytest

from ctxgate.gateway import context_room
from ctxgate.gateway.context_recurring import beginnings
from ctxgate.gateway.context_room import AT_ONCE, WAITING, Room
from support.chats import chat


@pytest.mark.parametrize(
    ("messages", "least", "lengths"),
    [
        ("S U A[a] Ra", 0, [3, 2]),
        ("S U A[a] Ra U", 0, [4, 3, 2]),  # the last message may be a reminder that the next request lacks
        ("S U A[a] Ra U U", 0, [4, 3, 2]),
        ("S U A[a] Ra A U", 0, [5, 4]),
        ("S U A[a] Ra A U", 5, [5]),  # what is known goes out under a compaction of 5 messages
        ("S U A[a] Ra U", 5, []),
        ("S U", 0, []),
        ("U A", 0, [1]),
        ("A", 0, []),
    ],
)
def test_context_f7_the_beginnings_that_may_recur(messages: str, least: int, lengths: list[int]) -> None:
    assert beginnings(chat(messages), least) == lengths


def test_context_f13_a_replica_has_room_for_few_and_all_together_for_few_bytes() -> None:
    room, one, other = Room(), ("pool", "one"), ("pool", "other")
    assert [room.take(one, 1) for _ in range(WAITING + 1)] == [True] * WAITING + [False]
    assert room.take(other, context_room.HELD_BYTES - WAITING)
    assert not room.take(other, 1)
    room.give_back(one, 1)
    assert room.take(other, 1)


def test_context_f13_a_single_prompt_may_be_of_any_length() -> None:
    room = Room()
    assert room.take(("pool", "one"), 2 * context_room.HELD_BYTES)
    assert not room.take(("pool", "one"), 1)


async def test_context_f13_few_work_at_a_replica_at_once() -> None:
    room = Room()
    for _ in range(AT_ONCE):
        await room.turn(("pool", "one")).acquire()
    assert room.turn(("pool", "one")).locked()
    assert not room.turn(("pool", "other")).locked()
