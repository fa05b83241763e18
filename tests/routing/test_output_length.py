"""Lengths of answers: a quantile by team, model and class, under the request's limit."""

from __future__ import annotations

from collections import deque

import pytest

from ctxgate.routing.output_length import UNKNOWN, WINDOW, OutputLengths, quantile


def learned(*lengths: int, share: float = 0.75, cut: bool = False) -> OutputLengths:
    known = OutputLengths(share)
    for each in lengths:
        known.learn("research", "tiny", "agent", each, cut=cut)
    return known


def test_three_of_four_answers_are_not_longer() -> None:
    known = learned(*range(100, 900, 100))
    assert known.expected("research", "tiny", "agent") == 600  # the sixth of eight


def test_another_quantile_can_be_asked_for() -> None:
    assert learned(*range(100, 900, 100), share=0.5).expected("research", "tiny", "agent") == 400


def test_a_request_is_never_expected_to_pass_its_own_limit() -> None:
    known = learned(*[800] * 10)
    assert known.expected("research", "tiny", "agent", 100) == 100
    assert known.expected("research", "tiny", "agent", 1000) == 800
    assert OutputLengths().expected("research", "tiny", "agent", 16) == 16


def test_of_an_unknown_group_the_answers_of_its_model_count_and_of_no_other() -> None:
    known = learned(*[800] * 10)
    assert known.expected("sales", "tiny", "batch") == 800
    assert known.expected("research", "tiny-fast", "agent") == UNKNOWN


def test_a_few_answers_are_not_taken_for_all() -> None:
    assert learned(*[4000] * 7).expected("research", "tiny", "agent") == UNKNOWN


def test_classes_are_kept_apart() -> None:
    known = learned(*[100] * 10)
    for _ in range(10):
        known.learn("research", "tiny", "reasoning", 5000)
    assert known.expected("research", "tiny", "agent") == 100
    assert known.expected("research", "tiny", "reasoning") == 5000


def test_answers_that_were_cut_off_count_as_at_least_so_long() -> None:
    """Product limit by hand: 100, 200, 200+, 300: S = 3/4, 1/2, then 0 at 300; so 3/4 do not pass 300."""
    assert quantile(deque([(100, False), (200, True), (200, False), (300, False)]), 0.75) == 300
    assert quantile(deque([(100, False), (200, True), (200, False), (300, False)]), 0.5) == 200
    assert quantile(deque([(64, True)] * 5), 0.75) == 64


def test_only_the_latest_answers_count() -> None:
    known = learned(*[5000] * WINDOW, *[50] * WINDOW)
    assert known.expected("research", "tiny", "agent") == 50


def test_groups_are_bounded_and_those_not_used_go_first() -> None:
    known = OutputLengths(groups=4)
    for team in ("a", "b", "c", "a", "d", "e"):
        for _ in range(8):
            known.learn(team, "tiny", "agent", 10)
    assert len(known) == 4
    for _ in range(20):
        known.learn("z", "tiny", "agent", 900)
    assert known.expected("e", "tiny", "agent") == 10
    assert known.expected("b", "tiny", "agent") == 900  # forgotten: by its model's answers


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_quantile_lies_between_none_and_all(share: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        OutputLengths(share)
