"""The robust fit: right coefficients, the prior where rows say nothing, and no power to single rows."""

from __future__ import annotations

import pytest

from ctxgate.routing.latency_fit import fit, least_squares

PRIOR = (0.01, 80e-6, 8e-10)
UNITS = (0.02, 80e-6, 8e-10)
POINTS = [(n, length) for n in (50, 400, 3000) for length in (4000, 20_000, 200_000)]
TRUE = (0.05, 200e-6, 3e-10)


def row(new: int, length: int, factor: float = 1.0) -> tuple[float, float, float]:
    """A row without noise: `a + b n + c n (L - n/2)`, times a factor."""
    pairs = new * (length - new / 2)
    return float(new), pairs, (TRUE[0] + TRUE[1] * new + TRUE[2] * pairs) * factor


def refitted(rows: list[tuple[float, float, float]]) -> tuple[float, float, float]:
    """As a predictor does it: time and again, from the solution before."""
    found = PRIOR
    for _ in range(5):
        found = fit(rows, found, PRIOR, UNITS)
    return found


def test_exact_rows_give_their_coefficients_back() -> None:
    found = refitted([row(*point) for point in POINTS * 8])
    assert found == pytest.approx(TRUE, rel=0.02)


def test_one_row_in_eight_that_is_wrong_by_a_hundredfold_changes_little() -> None:
    rows = [row(*point) for point in POINTS * 8]
    spoilt = [(x1, x2, y * 100) if at % 8 == 0 else (x1, x2, y) for at, (x1, x2, y) in enumerate(rows)]
    assert refitted(spoilt) == pytest.approx(TRUE, rel=0.15)


def test_without_rows_the_prior_holds() -> None:
    assert fit([], (1.0, 1.0, 1.0), PRIOR, UNITS) == PRIOR


def test_rows_that_are_all_alike_leave_the_proportions_of_the_prior() -> None:
    """They tell one number: what such a request takes. No coefficient runs away from another."""
    rows = [row(1000, 1000)] * 50
    base, linear, attention = refitted(rows)
    predicted = base + linear * rows[0][0] + attention * rows[0][1]
    assert predicted == pytest.approx(rows[0][2], rel=0.02)
    assert linear / PRIOR[1] < 4
    assert attention / PRIOR[2] < 4


def test_a_single_row_a_hundred_times_off_moves_no_coefficient_far() -> None:
    new, pairs, seen = 2000.0, 2000.0 * 1000, (PRIOR[0] + PRIOR[1] * 2000 + PRIOR[2] * 2e6) * 100
    found = fit([(new, pairs, seen)], PRIOR, PRIOR, UNITS)
    assert all(each < 5 * before for each, before in zip(found, PRIOR, strict=True))


def test_times_that_fall_with_the_prompt_give_no_negative_coefficient() -> None:
    rows = [(float(n), n * 5000.0, 1.0 / n) for n in (10, 100, 1000, 4000)] * 20
    assert min(refitted(rows)) >= 0.0


def test_least_squares_with_bounds_is_the_best_of_all_sets_of_zeros() -> None:
    """Worked out by hand: the free solution is (2, -1, 0.5); with the second at zero it is (1.5, 0, 0.5)."""
    a = ((2.0, 1.0, 0.0), (1.0, 2.0, 0.0), (0.0, 0.0, 2.0))
    assert least_squares(a, (3.0, 0.0, 1.0)) == pytest.approx((1.5, 0.0, 0.5))
    assert least_squares(a, (4.0, 5.0, 2.0)) == pytest.approx((1.0, 2.0, 1.0))
    assert least_squares(a, (-1.0, -1.0, -1.0)) == (0.0, 0.0, 0.0)


def test_coefficients_that_cannot_be_told_apart_are_one_of_them() -> None:
    a = ((1.0, 1.0, 0.0), (1.0, 1.0, 0.0), (0.0, 0.0, 1.0))
    z = least_squares(a, (2.0, 2.0, 3.0))
    assert z[0] + z[1] == pytest.approx(2.0)
    assert z[2] == pytest.approx(3.0)
