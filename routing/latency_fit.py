"""Robust least squares with non-negative coefficients for `y = a + b x1 + c x2`, with a prior.

What is minimized, over the rows of a window, is the sum of Huber's loss of the *relative* errors: times of
prompts of 1k and of 500k tokens count alike, and one sample that is wrong by a factor of a hundred weighs
as much as one that is wrong by a little. A penalty pulls each coefficient to its prior; it fades as rows
come in, and decides alone what the rows leave open (prompts that are all alike tell no slope).

Iteratively reweighted, from the last solution on: O(rows) per iteration, a few microseconds each ten rows.
(Huber, Robust Statistics, 1981, chapter 7; the least squares with bounds are solved exactly, by trying the
few sets of coefficients that may be zero.)
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Triple: TypeAlias = tuple[float, float, float]
Row: TypeAlias = tuple[float, float, float]
"""x1, x2 and y. y is above zero."""

HUBER: Final = 1.345  # 95 % as efficient as least squares where the errors are normal
_LEAST_SCALE, _MOST_SCALE = 0.02, 0.5  # of a relative error's spread
_NORMAL: Final = 1.4826  # standard deviation over median absolute deviation of a normal distribution
_FADES: Final = 8  # rows after which the prior counts half
_ITERATIONS: Final = 2
_SETS: Final = tuple(free for size in (3, 2, 1) for free in combinations(range(3), size))


def fit(rows: Sequence[Row], start: Triple, prior: Triple, units: Triple) -> Triple:
    """The coefficients of the rows, none of them negative.

    `start`: where to begin, such as the solution before. `units`: how far a coefficient may well be from its
    `prior`, all above zero. Without rows, the prior.
    """
    if not rows:
        return prior
    found = start
    pull = _FADES / (_FADES + len(rows))
    for _ in range(_ITERATIONS):
        found = _step(rows, found, prior, units, pull)
    return found


def _step(rows: Sequence[Row], at: Triple, prior: Triple, units: Triple, pull: float) -> Triple:
    """One iteration: weights by the errors at `at`, then weighted least squares in multiples of `units`."""
    base, linear, square = at
    u0, u1, u2 = units
    predicted = [base + linear * x1 + square * x2 for x1, x2, _ in rows]
    # A prediction of almost nothing would make an error of almost nothing a large one.
    floor = 0.1 * min(y for _, _, y in rows)
    predicted = [max(each, floor) for each in predicted]
    errors = [abs(y - p) / p for (_, _, y), p in zip(rows, predicted, strict=True)]
    scale = min(max(_NORMAL * sorted(errors)[len(errors) // 2], _LEAST_SCALE), _MOST_SCALE)
    bound = HUBER * scale
    a00 = a01 = a02 = a11 = a12 = a22 = b0 = b1 = b2 = 0.0
    for (x1, x2, y), p, error in zip(rows, predicted, errors, strict=True):
        relative = scale * p
        weight = (1.0 if error <= bound else bound / error) / (relative * relative)
        f1, f2 = u1 * x1, u2 * x2
        w1, w2 = weight * f1, weight * f2
        a00 += weight
        a01 += w1
        a02 += w2
        a11 += w1 * f1
        a12 += w1 * f2
        a22 += w2 * f2
        b0 += weight * y
        b1 += w1 * y
        b2 += w2 * y
    a00, b0 = a00 * u0 * u0 + pull, b0 * u0 + pull * prior[0] / u0
    a01, a02 = a01 * u0, a02 * u0
    a11, b1 = a11 + pull, b1 + pull * prior[1] / u1
    a22, b2 = a22 + pull, b2 + pull * prior[2] / u2
    z0, z1, z2 = least_squares(((a00, a01, a02), (a01, a11, a12), (a02, a12, a22)), (b0, b1, b2))
    return z0 * u0, z1 * u1, z2 * u2


def least_squares(a: tuple[Triple, Triple, Triple], b: Triple) -> Triple:
    """The z >= 0 that minimizes `z a z / 2 - b z`, for a symmetric positive definite `a`."""
    best: Triple = (0.0, 0.0, 0.0)
    gain = 0.0  # of the best so far: at a solution over a free set, the minimum is -b z / 2
    for free in _SETS:
        solved = _solved(a, b, free)
        if solved is None:
            continue
        value = sum(b[at] * each for at, each in zip(free, solved, strict=True))
        if min(solved) >= 0.0 and value > gain:
            z = [0.0, 0.0, 0.0]
            for at, each in zip(free, solved, strict=True):
                z[at] = each
            best, gain = (z[0], z[1], z[2]), value
            if len(free) == len(b):  # no other set can be better
                break
    return best


def _solved(a: tuple[Triple, Triple, Triple], b: Triple, free: Iterable[int]) -> list[float] | None:
    """The solution over some coefficients, the others zero; None where they cannot be told apart."""
    chosen = list(free)
    rows = [[a[i][j] for j in chosen] + [b[i]] for i in chosen]
    size = len(rows)
    for at in range(size):  # symmetric positive definite: no pivoting is needed
        pivot = rows[at][at]
        if pivot <= 1e-12 * a[chosen[at]][chosen[at]]:
            return None
        for below in range(at + 1, size):
            factor = rows[below][at] / pivot
            for column in range(at, size + 1):
                rows[below][column] -= factor * rows[at][column]
    found = [0.0] * size
    for at in reversed(range(size)):
        known = sum(rows[at][j] * found[j] for j in range(at + 1, size))
        found[at] = (rows[at][size] - known) / rows[at][at]
    return found
