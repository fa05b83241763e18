"""The margin on a prediction that a wanted share of outcomes stays below, whatever their distribution.

Adaptive conformal inference (Gibbs and Candès, 2021): the margin is an empirical quantile of the latest
residuals, outcome minus prediction, and the level of that quantile follows how often the margin was passed.
Each miss raises the level by `STEP * coverage`, each hit lowers it by `STEP * (1 - coverage)`, so that over
any long run the share of hits is the wanted one, also while the residuals drift: after T outcomes it is off
by at most (range of the level) / (STEP T), as long as the level stays inside its range. Beyond 1 there is no
residual left to go by: the margin then grows above the largest one, by multiples of the residuals' spread.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from math import ceil
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

COVERAGE: Final = 0.9
WINDOW: Final = 128
STEP: Final = 0.05
_LEAST, _MOST = 0.0, 2.0  # of the level
_BEYOND: Final = 4.0  # spreads above the largest residual, per unit of level


class Margin:
    """The margin for one kind of prediction. `unknown`: what it is while there are too few residuals.

    `coverage` lies between 0.5 and 0.99. O(log window) per residual, and one move within the window.
    """

    __slots__ = ("_coverage", "_latest", "_level", "_sorted", "_step", "_unknown")

    def __init__(
        self, unknown: float, coverage: float = COVERAGE, *, window: int = WINDOW, step: float = STEP
    ) -> None:
        if not 0.5 <= coverage <= 0.99:
            raise ValueError("a coverage lies between 0.5 and 0.99")
        self._unknown = unknown
        self._coverage = coverage
        self._step = step
        self._level = coverage
        self._latest: deque[float] = deque(maxlen=window)
        self._sorted: list[float] = []

    def __len__(self) -> int:
        """The residuals it stands on."""
        return len(self._latest)

    @property
    def value(self) -> float:
        """What to add to the next prediction."""
        count = len(self._sorted)
        if (count + 1) * self._coverage > count:  # too few for any level
            return max(self._unknown, self._sorted[-1]) if count else self._unknown
        rank = max(ceil((count + 1) * self._level), 1)  # among one more that is like them
        if rank <= count:
            return self._sorted[rank - 1]
        spread = self._sorted[int(count * self._coverage)] - self._sorted[count // 2]
        return self._sorted[-1] + _BEYOND * max(self._level - 1.0, 0.0) * spread

    def add(self, residual: float) -> None:
        """Learn an outcome minus its prediction without the margin."""
        missed = residual > self.value
        change = self._coverage if missed else self._coverage - 1.0
        self._level = min(max(self._level + self._step * change, _LEAST), _MOST)
        if len(self._latest) == self._latest.maxlen:
            del self._sorted[bisect_left(self._sorted, self._latest[0])]
        self._latest.append(residual)
        insort(self._sorted, residual)

    def replace(self, residuals: Iterable[float]) -> None:
        """The latest residuals as they are by a better prediction; the level stays."""
        self._latest.clear()
        self._latest.extend(residuals)
        self._sorted = sorted(self._latest)
