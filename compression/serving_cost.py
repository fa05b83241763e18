"""What length costs on hardware of one's own: predicted latency, and rates from GPU-seconds.

Times are integers of femtoseconds (10**-15 s), so that a prediction is exact and the same everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import isfinite
from typing import TYPE_CHECKING, Final

from ctxgate.inference.rates import TOKENS_PER_RATE, Rates

if TYPE_CHECKING:
    from datetime import date

FS_PER_SECOND: Final = 10**15
FS_PER_MS: Final = 10**12
_SECONDS_PER_HOUR: Final = 3600


@dataclass(frozen=True, slots=True)
class Speed:
    """A pool's measured speed, in femtoseconds.

    `linear` per new token, `attention` per pair of a new token and one that it attends to; `step` per
    decode step at the pool's usual batch, and `context` more for each token of the sequence's context.
    """

    linear: int
    attention: int
    step: int
    context: int

    @classmethod
    def from_seconds(cls, linear: float, attention: float, step: float, context: float) -> Speed:
        """The same coefficients in seconds. Raises ValueError where one is negative or not finite."""
        given = (linear, attention, step, context)
        if not all(isfinite(each) and each >= 0 for each in given):
            raise ValueError("a coefficient of speed is negative or not finite")
        return cls(*(round(Fraction(each) * FS_PER_SECOND) for each in given))


def time_to_first(speed: Speed, new: int, length: int, waiting: int = 0) -> int:
    """Predicted femtoseconds until the first token: `waiting + c_lin n + c_att n (L - n/2)`.

    The prompt has `length` tokens, the last `new` of them not cached. `waiting`: the queue before it,
    and a residual where one is known, in femtoseconds.
    """
    return waiting + speed.linear * new + speed.attention * new * (2 * length - new) // 2


def between_tokens(speed: Speed, length: int) -> int:
    """Predicted femtoseconds from one output token to the next at a context of `length` tokens."""
    return speed.step + speed.context * length


@dataclass(frozen=True, slots=True)
class Latency:
    """A task's latency budget and what predicts its requests. A limit that is None does not bind.

    `first_ms`: until the first token; `between_ms`: from token to token; `whole_ms`: the whole answer of
    `output` tokens. `waiting_ms`: the queue expected in front of a request.
    """

    speed: Speed
    first_ms: int | None = None
    between_ms: int | None = None
    whole_ms: int | None = None
    output: int = 0
    waiting_ms: int = 0

    def fits(self, new: int, length: int) -> bool:
        """Whether a request of `length` prompt tokens, the last `new` not cached, keeps every limit."""
        first = time_to_first(self.speed, min(new, length), length, self.waiting_ms * FS_PER_MS)
        between = between_tokens(self.speed, length)
        pairs = (
            (self.first_ms, first),
            (self.between_ms, between),
            (self.whole_ms, first + between * self.output),
        )
        return all(limit is None or time <= limit * FS_PER_MS for limit, time in pairs)


@dataclass(frozen=True, slots=True)
class Load:
    """The usual request of a pool and the room it has.

    `length` prompt tokens of which `new` are not cached, `output` tokens answered, `batch` sequences
    decoding at once, `kv_tokens` of cache on one replica; `gpu_hour_nano`: nano-dollars per hour of a
    replica, all its GPUs together. Raises ValueError where a number makes no sense.
    """

    length: int
    new: int
    output: int
    batch: int
    kv_tokens: int
    gpu_hour_nano: int

    def __post_init__(self) -> None:
        if not 0 <= self.new <= self.length or min(self.output, self.gpu_hour_nano) < 0:
            raise ValueError("a usual request has 0 <= new <= length, and nothing negative")
        if self.batch < 1 or self.kv_tokens < 1:
            raise ValueError("a replica decodes at least one sequence and holds at least one token")


def gpu_rates(speed: Speed, load: Load, effective: date) -> Rates:
    """Rates of a pool that is paid by the hour: what each kind of token takes of its GPUs.

    The parts add up to the seconds of the usual request: a prompt token is read by each new token
    (prefill) and by each output token (decode), a new one is computed besides, an output token takes its
    share of the step. A cached token is never free: it also occupies memory as long as the request runs,
    and the scarcer of the two, time or memory, sets its rate. Writing costs what computing costs.
    """
    decode = Fraction(speed.context * load.output)
    time = decode + speed.attention * load.new
    step = Fraction(speed.step, load.batch)
    running = time_to_first(speed, load.new, load.length) + load.output * between_tokens(speed, load.length)
    memory = Fraction(running, load.kv_tokens)
    uncached = speed.linear + Fraction(speed.attention * load.new, 2) + decode
    cached = max(time, memory)
    nano_per_fs = Fraction(load.gpu_hour_nano, _SECONDS_PER_HOUR * FS_PER_SECOND)

    def rate(femtoseconds: Fraction) -> int:
        return int(femtoseconds * nano_per_fs * TOKENS_PER_RATE + Fraction(1, 2))  # half up

    # No token costs less computed than cached, or memory would make a miss look like a saving.
    computed = rate(max(uncached, cached))
    return Rates(
        uncached=computed,
        cached=rate(cached),
        output=rate(step + decode / 2),
        written=computed,
        effective=effective,
    )
