"""Where a prompt leaves the one before it, learned from the blocks that the two share."""

from __future__ import annotations

from ctxgate.routing.kv_ends import Ends


def learn(ends: Ends, prompt: int, shared: int, answered: int = 0, ending: str = "stop") -> None:
    ends.learn("pool", ending, prompt=prompt, block=16, shared=shared, answered=answered)


def test_how_far_before_its_end_a_prompt_is_left_is_narrowed_down() -> None:
    ends = Ends()
    assert ends.short("pool", "stop") == 0
    learn(ends, 98, 5)  # five blocks are 80 tokens and six would be 96: it was left 3 to 18 before its end
    assert ends.short("pool", "stop") == 3
    learn(ends, 100, 5)  # 5 to 20
    assert ends.short("pool", "stop") == 5
    learn(ends, 103, 6)  # all six blocks: at most 7
    assert ends.short("pool", "stop") == 5
    assert ends.short("pool", "length") == ends.short("other", "stop") == 0


def test_one_pair_that_is_no_next_turn_changes_nothing_for_long() -> None:
    ends = Ends()
    for _ in range(4):
        learn(ends, 100, 6)
    learn(ends, 100, 2)
    assert ends.short("pool", "stop") == 0


def test_whether_hits_reach_into_answers_is_what_most_did() -> None:
    ends = Ends()
    assert not ends.reaches("pool", "stop")
    for shared in (9, 9, 6):
        learn(ends, 100, shared, answered=9)
    assert ends.reaches("pool", "stop")
    for _ in range(3):
        learn(ends, 100, 6, answered=9)
    assert not ends.reaches("pool", "stop")


def test_endings_of_any_name_take_no_more_memory() -> None:
    ends = Ends()
    learn(ends, 98, 5, ending="a")
    assert ends.short("pool", "b") == 3
