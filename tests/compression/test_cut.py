"""Cuts fall between rounds, whatever the order in which calls and results arrive."""

from __future__ import annotations

from typing import Any

import pytest

from ctxgate.compression.cut import (
    ABANDONED_AFTER,
    Cut,
    CutReason,
    Range,
    Unit,
    head_length,
    pinned,
    plan_cut,
    remaining,
    stands,
    still_stands,
    units,
)
from ctxgate.compression.said import read_said
from ctxgate.compression.validity import pairing_faults
from support.chats import chat, raw

LARGE = 1_000_000


def spans(text: str) -> list[tuple[int, int]]:
    return [(unit.start, unit.stop) for unit in units(chat(text))]


def planned(text: str, tail: int = 1, **options: Any) -> Cut:
    messages = chat(text)
    cut = plan_cut(messages, [1] * len(messages), tail_tokens=tail, room=LARGE, **options)
    assert stands(messages, cut.dropped)
    assert not pairing_faults(remaining(messages, cut.dropped)) - pairing_faults(messages)
    return cut


def kept(text: str, cut: Cut) -> str:
    gone = {at for each in cut.dropped for at in range(each.start, each.stop)}
    return " ".join(short for at, short in enumerate(text.split()) if at not in gone)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("S U A U", [(0, 1), (1, 2), (2, 3), (3, 4)]),
        ("U A[a] Ra A", [(0, 1), (1, 3), (3, 4)]),
        ("U A[a,b] Ra Rb U", [(0, 1), (1, 4), (4, 5)]),
        ("U A[a,b] Rb Ra U", [(0, 1), (1, 4), (4, 5)]),
        ("U A[a] U A Ra U", [(0, 1), (1, 5), (5, 6)]),  # an approval between call and result
        ("U A[a] A[b] Ra Rb U", [(0, 1), (1, 5), (5, 6)]),  # rounds that cross
        ("U A[a] Ra A[a] Ra U", [(0, 1), (1, 3), (3, 5), (5, 6)]),  # an id used again
        ("U Rx U", [(0, 2), (2, 3)]),  # a result without a call
        ("Rx U", [(0, 1), (1, 2)]),
        ("", []),
    ],
)
def test_context_l5_units_hold_calls_and_results_together(text: str, expected: list[tuple[int, int]]) -> None:
    assert spans(text) == expected


def test_context_a1_a11_a_result_is_never_kept_without_its_call() -> None:
    """Keeping three messages would keep R1 alone: its round goes or stays as one."""
    text = "S U A[c1] Rc1 A U"
    assert kept(text, planned(text, tail=3)) == "S U A U"
    assert kept(text, planned(text, tail=4)) == text


def test_context_a2_the_tail_is_made_of_rounds_not_of_messages() -> None:
    text = "S U " + " ".join(f"A[c{n}] Rc{n}" for n in range(10)) + " U"
    for tail in range(1, 22):
        shorts = kept(text, planned(text, tail=tail)).split()
        assert shorts[:2] == ["S", "U"]
        assert not shorts[2].startswith("R")


def test_context_a4_the_border_moves_back_to_the_call() -> None:
    text = "S U A A[c1] Rc1"
    assert kept(text, planned(text, tail=1)) == "S U A[c1] Rc1"


def test_context_a5_an_abandoned_call_does_not_stop_cuts_for_ever() -> None:
    """While a result may still come nothing is cut; after some answers more the call counts as given up."""
    waiting = "S U A[c1] U" + " A U" * (ABANDONED_AFTER - 1)
    assert planned(waiting).reason is CutReason.OPEN_CALL
    assert planned(waiting).dropped == ()
    given_up = waiting + " A U"
    assert kept(given_up, planned(given_up)) == "S U U"


def test_context_a7_d7_the_first_message_after_the_head_is_the_users() -> None:
    text = "S U A[a] Ra A"
    assert kept(text, planned(text, tail=1)) == "S U A"


def test_context_a10_calls_and_results_are_linked_by_id() -> None:
    text = "S U A A[c1] U A Rc1 A U"
    for tail in range(1, 9):
        assert kept(text, planned(text, tail=tail)) in (text, "S U A U", "S U U", "S U A[c1] U A Rc1 A U")


def test_context_b1_b7_b8_a_batch_is_one_piece() -> None:
    text = "S U A[a,b,c] Ra Rb Rc A[d,e] Rd Re U"
    for tail in range(1, 12):
        shorts = kept(text, planned(text, tail=tail))
        assert shorts in ("S U U", "S U A[d,e] Rd Re U", text)


def test_context_b2_a_cut_is_not_applied_to_a_conversation_it_does_not_fit() -> None:
    """Chosen before the second result landed, inside what is one round later."""
    early, late = chat("S U A[a,b] Ra"), chat("S U A[a,b] Ra Rb A U")
    assert not stands(early, (Range(2, 4),))  # a call in it is open
    assert not stands(late, (Range(2, 4),))  # it would part the batch
    assert stands(late, (Range(2, 5),))
    assert not stands(late, (Range(2, 5), Range(5, 6)))  # one range, written as two
    assert not stands(late, (Range(3, 3),))
    assert not stands(late, (Range(2, 9),))
    assert stands(late, ())


def test_context_b4_results_out_of_order_stay_with_their_batch() -> None:
    text = "S U A[a,b] Rb Ra A U"
    assert kept(text, planned(text, tail=1)) == "S U U"
    assert kept(text, planned(text, tail=4)) == "S U A U"


def test_context_b5_results_on_both_sides_of_a_user_message_are_one_batch() -> None:
    assert spans("S U A[a,b] Ra U Rb A U") == [(0, 1), (1, 2), (2, 6), (6, 7), (7, 8)]


def test_context_b10_nothing_is_cut_while_a_batch_is_incomplete() -> None:
    cut = planned("S U A A A[a,b] Ra")
    assert (cut.dropped, cut.reason) == ((), CutReason.OPEN_CALL)
    assert units(chat("U A[a,b] Ra"))[-1] == Unit(1, 3, open=True)


def test_context_d3_notes_inside_the_conversation_are_no_head() -> None:
    assert head_length(chat("U A U A N U")) == 0
    assert head_length(chat("S N U N A")) == 2
    text = "U A U A N U"
    assert kept(text, planned(text)) == "U U"


def test_context_d9_the_head_is_outside_of_what_can_be_dropped() -> None:
    text = "S N U A A A U"
    assert kept(text, planned(text)) == "S N U U"
    assert planned("S N").dropped == ()
    assert planned("").dropped == ()


def test_context_d10_the_second_cut_keeps_the_same_user_messages_and_reaches_further() -> None:
    one = "S U A A U A"
    two = one + " A A U A"
    first = planned(one)
    second = planned(two, floor=first.dropped[-1].stop)
    assert kept(one, first) == "S U U A"
    assert kept(two, second) == "S U U A"
    gone = {at for each in second.dropped for at in range(each.start, each.stop)}
    assert all(at in gone for each in first.dropped for at in range(each.start, each.stop))


def test_context_n2_the_last_user_message_stays() -> None:
    text = "S U A U A[a] Ra A[b] Rb A"
    assert kept(text, planned(text)) == "S U U A"


def test_context_m1_an_empty_range_is_no_cut() -> None:
    cut = planned("S U A", tail=100)
    assert (cut.dropped, cut.reason) == ((), CutReason.NOTHING_OLD)


def test_a_floor_is_not_taken_back() -> None:
    text = "S U A A A A U"
    assert planned(text, tail=100, floor=4).dropped == (Range(2, 4),)
    assert planned("S U A[a] Ra A U", tail=100, floor=3).dropped == (Range(2, 4),)


def test_kept_messages_stay_with_their_whole_round() -> None:
    text = "S U A A[a,b] Ra Rb A U"
    cut = planned(text, keep={4})
    assert kept(text, cut) == "S U A[a,b] Ra Rb U"
    assert cut.dropped == (Range(2, 3), Range(6, 7))


def test_context_l5_a_message_larger_than_the_room_is_split() -> None:
    """The head cannot be split, nor can a message that calls tools."""
    messages = chat("S U A[a] Ra U")
    cut = plan_cut(messages, [900, 100, 900, 900, 5], tail_tokens=10_000, room=800)
    assert cut.dropped == ()
    assert cut.split == (3,)


def test_context_e2_e5_pins_and_sticky_results_are_kept() -> None:
    """A pin has no ceiling; sticky results and notes are kept from the latest back."""
    said = [read_said(raw(short)) for short in ("S", "U", "A[a]", "Ra", "A[b]", "Rb", "N", "U")]
    assert pinned(said, [1] * 8) == set()
    assert pinned(said, [1] * 8, sticky={"f"}, ceiling=3) == {3, 5, 6}
    assert pinned(said, [1] * 8, sticky={"f"}, ceiling=2) == {5, 6}
    assert pinned(said, [1] * 8, sticky={"g"}, ceiling=2) == {0, 6}
    pin = b'{"role":"user","content":"never commit","ctxgate":{"pin":true}}'
    part = b'{"role":"user","content":[{"type":"text","text":"x","ctxgate":{"pin":true}}]}'
    no_pin = b'{"role":"user","content":"x","ctxgate":{"pin":1}}'
    assert pinned([read_said(each) for each in (pin, part, no_pin)], [9, 9, 9]) == {0, 1}


def test_context_g3_a_message_is_split_for_its_text_alone() -> None:
    messages = chat("S U A U")
    cut = plan_cut(messages, [10, 900, 10, 900], tail_tokens=10_000, room=800, media={1: 850, 3: 99})
    assert cut.split == (3,)


@pytest.mark.parametrize(
    ("text", "since", "surely"),
    [
        ("S U A[a] Ra A[b] Rb U A[c] Rc A[d] Rd A[e] Re", 9, True),
        ("S U A[a] Ra A[b] Rb U A[c] Rc A[d] Rd A[e] Re U", 13, True),
        ("S U A[a] Ra A[b] Rb U A[c] Rc A[d] Rd A[e] Re", 6, False),  # nothing behind the range was known
        ("S U A[a] Ra A[b] Rb U A[c] Rc A[d] Rd", 9, False),  # the range's calls may still be waited for
        ("S U A[a] Ra A[b] Rb U A[c] Rc A[d] Rd A[e] Re Rb", 13, False),  # a second result of a dropped call
        ("S U A[a] Ra A[b] Rb U A[c] Rc A[d] Rd A[e] Re Rx", 13, False),  # whose is it?
    ],
)
def test_what_stood_surely_stands_where_only_rounds_behind_it_have_come(
    text: str, since: int, surely: bool
) -> None:
    assert still_stands(chat(text), [Range(2, 6)], since) is surely
