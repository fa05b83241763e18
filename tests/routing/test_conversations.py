"""Where conversations went, what they may spend on leaving, and what they hold there."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ctxgate.routing.conversations import EARNED, LIVE_US, Conversations

HERE, THERE = ("standard", "a"), ("standard", "b")


def test_a_conversation_earns_by_warm_turns_and_no_more_than_one_saves() -> None:
    known = Conversations()
    assert known.of("c") is None
    for turn in range(1, 3 * EARNED):
        known.went("c", HERE, turn, saved_nano=800)
        standing = known.of("c")
        assert standing is not None
        assert standing.credit_nano == min(turn * 100, 800)


def test_leaving_is_paid_from_the_credit_and_never_below_nothing() -> None:
    known = Conversations()
    for turn in range(EARNED):
        assert not known.went("c", HERE, turn, saved_nano=800)
    assert known.went("c", THERE, 9, paid_nano=700)
    assert known.of("c") == (THERE, 100, 0, 9)
    assert known.went("c", HERE, 10, paid_nano=700)
    assert known.of("c") == (HERE, 0, 0, 10)


def test_a_smaller_saving_takes_nothing_away() -> None:
    known = Conversations()
    for turn in range(EARNED):
        known.went("c", HERE, turn, saved_nano=800)
    known.went("c", HERE, 9, saved_nano=8)
    standing = known.of("c")
    assert standing is not None
    assert standing.credit_nano == 800


def test_what_may_go_on_is_summed_where_it_was_last_and_until_it_was_silent_for_long() -> None:
    known = Conversations()
    known.went("c", HERE, 0, tokens=1_000)
    known.went("d", HERE, 5, tokens=50)
    known.went("c", HERE, 10, tokens=1_200)
    assert known.live_tokens(10) == {HERE: 1_250}
    known.went("c", THERE, 20, tokens=1_300)
    assert known.live_tokens(20) == {HERE: 50, THERE: 1_300}
    assert known.live_tokens(LIVE_US + 5) == {HERE: 0, THERE: 1_300}
    assert known.of("d") == (HERE, 0, 50, 5)  # its credit is kept
    assert known.live_tokens(LIVE_US + 20) == {HERE: 0, THERE: 0}
    known.went("d", HERE, LIVE_US + 30, tokens=60)
    assert known.live_tokens(LIVE_US + 30) == {HERE: 60, THERE: 0}


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from([HERE, THERE]), st.integers(0, 100), st.integers(0, 9)),
        max_size=60,
    )
)
def test_it_stays_small_and_its_sums_are_those_of_the_latest(
    steps: list[tuple[int, tuple[str, str], int, int]],
) -> None:
    known, now = Conversations(most=4), 0
    latest: dict[int, tuple[tuple[str, str], int, int]] = {}
    for name, place, tokens, passed in steps:
        now += passed * LIVE_US // 10
        known.went(name, place, now, tokens=tokens)
        latest.pop(name, None)
        latest[name] = (place, tokens, now)
        for gone in [*latest][:-4]:
            del latest[gone]
        assert len(known) == len(latest)
        told = known.live_tokens(now)
        for each in (HERE, THERE):
            mine = [size for at, size, when in latest.values() if at == each and when > now - LIVE_US]
            assert told.get(each, 0) == sum(mine)
