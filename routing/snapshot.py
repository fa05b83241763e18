"""What the router is asked, and what it may know: frozen values, made anew for each decision.

Times in budgets are microseconds, predicted times are seconds, prices integer nano-dollars per token times
one million (as `inference.rates` keeps them), lengths tokens.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Literal, TypeAlias

from msgspec.structs import replace

from ctxgate.inference.record import Record

if TYPE_CHECKING:
    from ctxgate.inference.rates import Rates

Profile: TypeAlias = Literal["fast", "standard"]
"""What a pool is tuned for: the first token soon, or many tokens cheaply."""


class LatencyBudget(Record, frozen=True):
    """How long one request may take from its arrival: to the first token, and in all. None: no bound.

    `prefer` breaks ties between pools that fit, and decides alone where there is no bound. `source` says
    which of the request's fields or the team's settings asked for it.
    """

    ttft_us: int | None = None
    total_us: int | None = None
    prefer: Profile | None = None
    source: str = "none"

    @property
    def bounds(self) -> bool:
        """Whether there is any bound."""
        return self.ttft_us is not None or self.total_us is not None

    def kept(self, ttft_us: int | None, total_us: int) -> bool:
        """Whether an answer was in time. The first token of one in one piece comes at its end."""
        first_us = total_us if ttft_us is None else ttft_us
        return (self.ttft_us is None or first_us <= self.ttft_us) and (
            self.total_us is None or total_us <= self.total_us
        )

    def left(self, spent_us: int) -> LatencyBudget:
        """What the next attempt gets after so many microseconds; never below zero."""
        return replace(
            self,
            ttft_us=None if self.ttft_us is None else max(self.ttft_us - spent_us, 0),
            total_us=None if self.total_us is None else max(self.total_us - spent_us, 0),
        )


class Demand(Record, frozen=True):
    """One attempt to be placed.

    `root` names the conversation, `request_id` breaks ties. `output_tokens` is the length expected of the
    answer. `credit_nano` is what this task may still spend on leaving a warm replica. `fresh`: nothing of
    the conversation was sent anywhere yet, so what is cached of the prompt belongs to others as well.
    """

    root: bytes
    request_id: str
    prompt_tokens: int
    output_tokens: int
    budget: LatencyBudget
    credit_nano: int = 0
    fresh: bool = False


class Work(Record, frozen=True, gc=False):
    """What a replica has to do at the moment of the decision.

    Of this gateway's own open attempts: `prefill_tokens` are the uncached tokens of those without a first
    token and `prefill_pairs` the sum of new (length - new / 2) over them, `decoding` counts the others and
    `context_tokens` sums their lengths. `running`, `waiting` and `kv_usage` (0..1) are the engine's own
    figures, of all its clients; None where it has not told.
    """

    prefill_tokens: int = 0
    decoding: int = 0
    context_tokens: int = 0
    prefill_pairs: int = 0
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None


IDLE = Work()


class Knowledge(StrEnum):
    """How well a replica's cache is known: by its events, by what was sent there, or not at all."""

    EXACT = "exact"
    DEGRADED = "degraded"
    COLD = "cold"


class ReplicaState(Record, frozen=True, gc=False):
    """One replica at the moment of the decision. `in_flight` counts this gateway's open attempts.

    `hit_tokens` are the tokens of this prompt that its cache should hold, 0 where nothing is known;
    `kv_tokens` is how many its cache holds in all, and `live_tokens` those of conversations that went there
    lately and may go on.
    """

    pool: str
    name: str
    healthy: bool
    in_flight: int
    draining: bool = False
    work: Work = IDLE
    kv_tokens: int | None = None
    hit_tokens: int = 0
    knowledge: Knowledge = Knowledge.COLD
    live_tokens: int = 0


class Speed(Record, frozen=True):
    """How fast a pool's replicas are, in the shape of `inference.twin_profile`, and how sure that is.

    `base_s` is the fixed part of a time to first token. Its margin, a quantile of the residuals, is `rho_s`
    and the share `rho_share` of the time itself; `itl_rho_s` is that of the time between two tokens. `slots`
    is how many sequences decode at once.
    """

    linear_s: float
    attention_s: float
    step_s: float
    sequence_s: float
    context_s: float
    base_s: float = 0.0
    rho_s: float = 0.0
    itl_rho_s: float = 0.0
    slots: int | None = None
    rho_share: float = 0.0

    def prefill_s(self, new: int, length: int) -> float:
        """Seconds to compute the last `new` tokens of a prompt of `length`."""
        return self.linear_s * new + self.attention_s * new * (length - new / 2)

    def queue_s(self, work: Work) -> float:
        """Seconds until the replica begins with a prompt that comes now: what waits is computed first."""
        return self.linear_s * work.prefill_tokens + self.attention_s * work.prefill_pairs

    def slot_s(self, output: int, length: int, work: Work, in_flight: int) -> float:
        """Seconds until one of `slots` is free, with so many in flight and answers of `output` tokens.

        Where their number is not known: an engine with requests that wait has no more than those that run.
        One that runs more than was said has as many.
        """
        slots, running = self.slots, work.running or 0
        if slots is None and work.waiting:
            slots = max(running, 1)
        elif slots is not None and running > slots:
            slots = running
        if slots is None or in_flight < slots:
            return 0.0
        return (in_flight + 1 - slots) / slots * output * self.itl_s(length, work)

    def ttft_s(self, new: int, length: int, work: Work) -> float:
        """Seconds to the first token of a prompt of `length` with `new` uncached tokens; not below zero."""
        expected_s = self.queue_s(work) + self.base_s + self.prefill_s(new, length)
        return max(expected_s + self.rho_share * expected_s + self.rho_s, 0.0)

    def itl_s(self, length: int, work: Work) -> float:
        """Seconds between two tokens of a sequence of `length` beside those that decode now."""
        sequences = 1 + work.decoding
        return (
            self.step_s
            + self.sequence_s * sequences
            + self.context_s * (length + work.context_tokens)
            + self.itl_rho_s
        )

    def total_s(self, new: int, length: int, output: int, work: Work) -> float:
        """Seconds to the last of `output` tokens."""
        return self.ttft_s(new, length, work) + max(output - 1, 0) * self.itl_s(length, work)


class PoolTerms(Record, frozen=True):
    """A pool as the router weighs it: its profile, its prices for this prompt, its speed.

    `order` is its place in the model's list, the default first.
    """

    name: str
    order: int
    profile: Profile | None
    rates: Rates | None
    speed: Speed | None
