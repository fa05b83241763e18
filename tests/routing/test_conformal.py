"""The margin: a quantile of the latest residuals, whose level follows the misses."""

from __future__ import annotations

import pytest

from ctxgate.routing.conformal import Margin


def test_until_there_are_enough_residuals_it_is_what_was_said() -> None:
    """For 0.9 there must be nine: of ten exchangeable ones, the next is above all nine in one case of ten."""
    margin = Margin(5.0, 0.9)
    assert margin.value == 5.0
    for _ in range(8):
        margin.add(1.0)
        assert margin.value == 5.0
    margin.add(1.0)
    assert margin.value < 5.0


def test_before_that_a_larger_residual_counts() -> None:
    margin = Margin(5.0)
    margin.add(7.0)
    assert margin.value == 7.0


def test_the_rank_is_that_of_one_more_residual() -> None:
    """Of 1..99 at 0.9: ceil(100 x 0.9) = 90."""
    margin = Margin(0.0, 0.9, window=99, step=0.0)
    for each in range(99, 0, -1):
        margin.add(float(each))
    assert margin.value == 90.0


def test_only_the_latest_residuals_count() -> None:
    margin = Margin(0.0, 0.9, window=20, step=0.0)
    for each in [1000.0] * 20 + [1.0] * 20:
        margin.add(each)
    assert margin.value == 1.0
    assert len(margin) == 20


def test_misses_raise_it_and_hits_lower_it() -> None:
    margin = Margin(0.0, 0.9, window=100, step=0.05)
    margin.replace(float(each) for each in range(100))
    before = margin.value  # rank ceil(101 x 0.9) = 91
    assert before == 90.0
    margin.add(95.0)  # the level is 0.945 now: rank ceil(101 x 0.945) = 96 of 1..99 and the 95
    assert margin.value == 95.0
    for _ in range(30):
        margin.add(0.0)
    assert margin.value < before


def test_residuals_that_grow_without_end_are_still_covered_nine_times_in_ten() -> None:
    """An empirical quantile alone never is: each residual is larger than all before it."""
    margin = Margin(1.0, 0.9)
    covered = 0
    for at in range(2000):
        covered += float(at) <= margin.value
        margin.add(float(at))
    assert 0.87 <= covered / 2000 <= 0.93


@pytest.mark.parametrize("coverage", [0.0, 0.49, 1.0])
def test_a_coverage_of_all_or_of_less_than_half_is_refused(coverage: float) -> None:
    with pytest.raises(ValueError, match=r"between 0\.5 and 0\.99"):
        Margin(0.0, coverage)
