"""How many replicas a pool needs to keep its requests' latency budgets at the present load. Pure.

The load is what arrived lately, each request weighed less the longer ago it was. With n replicas each does
its share: of the prompts' prefill, and of the tokens that its decode steps make. The share of its time that
is so spent, rho, gives the wait of a new prompt (M/G/1, with the exponential tail of heavy traffic):

    P(wait > t) = rho exp(-t (1 - rho) / r),     r = E[S^2] / 2 E[S], the mean rest of a prefill S

n is enough when, over the budgets of the requests seen lately, the expected share of those that wait longer
than they can is at most what may miss, and when all sequences that decode at once have a slot.
"""

from __future__ import annotations

from collections import deque
from math import exp
from typing import TYPE_CHECKING, Final

from ctxgate.inference.record import Record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ctxgate.routing.snapshot import Speed

MEMORY_S: Final = 120.0
"""After so long an arrival weighs 1/e of a new one."""

FULL: Final = 0.8
"""The share of its time that a replica may be busy where no request has a budget."""

MAY_MISS: Final = 0.1
MOST: Final = 4096
_STRIDE_US: Final = 100_000  # what comes within it counts as come at once
_SLACKS: Final = 256  # of the latest requests with a budget


class Arrival(Record, frozen=True):
    """One request: what its prefill takes where it went, its answer, and how long it could have waited.

    `slack_s` is its budget to the first token less base, prefill and the residual's quantile; None: no
    budget. Below zero it was late without any wait.
    """

    at_us: int
    prefill_s: float
    output_tokens: int
    length: int
    slack_s: float | None = None


class Load(Record, frozen=True):
    """What comes per second: prefill seconds, their squares, output tokens, and the tokens' mean context."""

    prefill_s: float = 0.0
    prefill_s2: float = 0.0
    output_tokens: float = 0.0
    context: float = 0.0


class Arrivals:
    """The load of one pool, from its requests. Times are microseconds of one clock that never steps back."""

    def __init__(self, memory_s: float = MEMORY_S) -> None:
        self._memory_s = memory_s
        self._since_us: int | None = None
        self._at_us = 0
        self._sums = (0.0, 0.0, 0.0, 0.0)
        self.slacks: deque[float] = deque(maxlen=_SLACKS)

    def add(self, arrival: Arrival) -> None:
        """Note a request; they come in the order of their times."""
        at_us, work_s, tokens = arrival.at_us, arrival.prefill_s, arrival.output_tokens
        if self._since_us is None:
            self._since_us = self._at_us = at_us
        elif at_us - self._at_us > _STRIDE_US:
            kept = self._kept(at_us)
            prefill, squares, output, context = self._sums
            self._sums = (kept * prefill, kept * squares, kept * output, kept * context)
            self._at_us = at_us
        prefill, squares, output, context = self._sums
        self._sums = (
            prefill + work_s,
            squares + work_s * work_s,
            output + tokens,
            context + tokens * arrival.length,
        )
        if arrival.slack_s is not None:
            self.slacks.append(arrival.slack_s)

    def load(self, now_us: int) -> Load:
        """What comes per second now. A pool that has just begun is judged by the time it has run."""
        if self._since_us is None:
            return Load()
        run_s = max(now_us - self._since_us, 1_000_000) / 1e6
        seconds = self._memory_s * (1 - exp(-run_s / self._memory_s))
        kept = self._kept(now_us)
        prefill, squares, output, context = (kept * one for one in self._sums)
        return Load(
            prefill / seconds, squares / seconds, output / seconds, context / output if output > 0 else 0.0
        )

    def _kept(self, now_us: int) -> float:
        return exp(-max(now_us - self._at_us, 0) / 1e6 / self._memory_s)


def wanted(load: Load, slacks: Sequence[float], speed: Speed, may_miss: float = MAY_MISS) -> int:
    """The fewest replicas that keep the budgets; 0 where nothing comes, at most `MOST`.

    Requests that were late without any wait are no reason for more replicas: they would be late there too.
    """
    if load.prefill_s <= 0 and load.output_tokens <= 0:
        return 0
    waits = [slack for slack in slacks if slack >= 0]
    low, high = 1, 1
    while high < MOST and not _enough(high, load, waits, speed, may_miss):
        low, high = high + 1, high * 2
    high = min(high, MOST)
    while low < high:
        middle = (low + high) // 2
        if _enough(middle, load, waits, speed, may_miss):
            high = middle
        else:
            low = middle + 1
    return high


def _enough(replicas: int, load: Load, waits: Sequence[float], speed: Speed, may_miss: float) -> bool:
    per_token = speed.sequence_s + speed.context_s * load.context
    tokens = load.output_tokens / replicas
    decoding = tokens * per_token
    busy = load.prefill_s / replicas + decoding
    if busy >= 1:
        return False
    if speed.slots is not None and tokens * speed.step_s / (1 - busy) > speed.slots:
        return False
    if not waits:
        return busy <= FULL
    rest = load.prefill_s2 / (2 * load.prefill_s) if load.prefill_s > 0 else 0.0
    if rest <= 0:
        return True
    late = sum(exp(-slack * (1 - busy) / rest) for slack in waits) * busy / len(waits)
    return late <= may_miss
