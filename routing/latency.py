"""How fast the replicas of one pool are, learned from the requests that they answered.

    TTFT = base + linear n + attention n (L - n/2)     n uncached tokens of a prompt of L, without the queue
    ITL  = step + sequence s + context t               s sequences of t tokens in all decode at once

The coefficients are a robust fit over the latest samples (`latency_fit`), the margins conformal quantiles of
what was seen minus what is predicted for the load at the decision, so that they also cover what the model
leaves out: wrong estimates of the prompt, and work of other clients. That of the TTFT is a quantile of
`residual / (prediction + scale)`: prompts of 500k tokens are seconds off, and do not make those of 2k late.

One predictor speaks for one pool: pools of different hardware or tuning never share one.

Cost: a sample takes some microseconds; the fit, a fraction of a millisecond, is made anew after 1, 2, 4, ...
samples and then every `EVERY`.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from msgspec.structs import replace

from ctxgate.inference.record import Record
from ctxgate.inference.twin_profile import PROFILES
from ctxgate.routing.conformal import COVERAGE, Margin
from ctxgate.routing.latency_fit import Row, Triple, fit
from ctxgate.routing.snapshot import IDLE, Speed, Work

WINDOW: Final = 128
EVERY: Final = 32
ENOUGH: Final = 8
"""Samples after which a pool of which nothing was configured is known."""

SCALE_S: Final = 0.02
"""What a time of almost nothing is off by all the same, in seconds: a network, a busy machine."""

_LEAST_UNITS_TTFT: Final[Triple] = (0.02, 1e-6, 1e-11)
_LEAST_UNITS_ITL: Final[Triple] = (1e-3, 1e-5, 1e-9)
_LEAST_S: Final = 1e-6  # a time of nothing at all has no logarithm, and no relative error


class Sample(Record, frozen=True):
    """What one request said of its pool. Times in seconds; None where it did not show.

    `new` of the `length` prompt tokens were not cached, as counted. `ttft_s`: from its dispatch to its first
    token, `queue_s` of it in the engine's queue, as the engine tells. `itl_s`: the mean time between two of
    `output` tokens. `work` and `in_flight`: the load of the replica when it was chosen, the request not
    counted. `estimated_new` and `estimated_length`: what the prediction went by, None where not kept.
    """

    new: int
    length: int
    ttft_s: float | None = None
    queue_s: float | None = None
    output: int = 0
    itl_s: float | None = None
    work: Work = IDLE
    in_flight: int = 0
    estimated_new: int | None = None
    estimated_length: int | None = None


def default_speed(profile: str | None) -> Speed:
    """The speed of a pool of this profile before anything is known of it; of none: the standard one."""
    shape = PROFILES[profile or "standard"]
    return Speed(
        shape.linear_s,
        shape.attention_s,
        shape.step_s,
        shape.sequence_s,
        shape.context_s,
        slots=shape.max_num_seqs,
    )


class Predictor:
    """Learns the speed of one pool's replicas from samples.

    `prior` is what the operator says of them, None where nothing was said: then `speed` is None until
    `ENOUGH` samples have come. `coverage`: the share of the times that stay below the predicted ones.
    """

    def __init__(self, prior: Speed | None = None, coverage: float = COVERAGE) -> None:
        self._told = prior is not None
        self._prior = prior or replace(default_speed(None), slots=None)
        self._point = replace(self._prior, rho_s=0.0, rho_share=0.0, itl_rho_s=0.0)
        self._speed: Speed | None = None
        first, between = self._prior, self._prior
        self._ttft_prior: Triple = (first.base_s, first.linear_s, first.attention_s)
        self._itl_prior: Triple = (between.step_s, between.sequence_s, between.context_s)
        self._first: deque[Sample] = deque(maxlen=WINDOW)
        self._between: deque[Sample] = deque(maxlen=WINDOW)
        # Before anything is known, half of what is predicted may be missing.
        self._rho = Margin(0.5, coverage)
        self._itl_rho = Margin(0.5 * (between.step_s + between.sequence_s), coverage)
        self.samples = 0

    def speed(self) -> Speed | None:
        """What is known now; None where that is nothing."""
        if not self._told and len(self._first) < ENOUGH:
            return None
        if self._speed is None:
            share, itl_rho_s = self._rho.value, self._itl_rho.value
            scale_s = self._point.base_s + SCALE_S
            self._speed = replace(self._point, rho_s=share * scale_s, rho_share=share, itl_rho_s=itl_rho_s)
        return self._speed

    def observe(self, sample: Sample) -> None:
        """Learn from one request; what it did not show is not learned from."""
        first = sample.ttft_s is not None and 0 < sample.new <= sample.length
        between = sample.itl_s is not None and sample.output > 1
        if not first and not between:
            return
        self._speed = None
        self.samples += 1
        if first:
            if (error := self._ttft_error(sample)) is not None:
                self._rho.add(error)
            self._first.append(sample)
        if between:
            self._itl_rho.add(self._itl_error(sample))
            self._between.append(sample)
        if self.samples % EVERY == 0 or (self.samples < EVERY and self.samples & (self.samples - 1) == 0):
            self._refit()

    def _refit(self) -> None:
        """Fit both models anew, and let the margins go by the new predictions."""
        now, prior = self._point, self._ttft_prior
        rows = [row for sample in self._first if (row := self._ttft_row(sample)) is not None]
        start = (now.base_s, now.linear_s, now.attention_s)
        base, linear, attention = fit(rows, start, prior, _units(prior, _LEAST_UNITS_TTFT))
        prior = self._itl_prior
        start = (now.step_s, now.sequence_s, now.context_s)
        between = [_itl_row(sample) for sample in self._between]
        step, sequence, context = fit(between, start, prior, _units(prior, _LEAST_UNITS_ITL))
        self._point = replace(
            now,
            base_s=base,
            linear_s=linear,
            attention_s=attention,
            step_s=step,
            sequence_s=sequence,
            context_s=context,
        )
        errors = (self._ttft_error(sample) for sample in self._first)
        self._rho.replace(error for error in errors if error is not None)
        self._itl_rho.replace(self._itl_error(sample) for sample in self._between)

    def _ttft_row(self, sample: Sample) -> Row | None:
        """The time to the first token without the queue; None where that is mostly a guess."""
        seen = sample.ttft_s or 0.0
        queue = sample.queue_s
        if queue is None:
            queue = self._queue_s(sample)
            if queue > seen / 2:
                return None
        new, length = sample.new, sample.length
        return float(new), new * (length - new / 2), max(seen - queue, _LEAST_S)

    def _queue_s(self, sample: Sample) -> float:
        """What was predicted of the queue and of the wait for a slot."""
        return self._point.queue_s(sample.work) + self._slot_s(sample)

    def _slot_s(self, sample: Sample) -> float:
        work = sample.work
        sequences = max(sample.in_flight, (work.running or 0) + (work.waiting or 0))
        return self._point.slot_s(sample.output, sample.length, work, sequences)

    def _ttft_error(self, sample: Sample) -> float | None:
        """What was seen minus what is predicted from what was known at the decision, over its scale.

        Above -1, so that a prediction with its margin stays above zero. None where a wait for a slot would be
        much of it: that is a guess, and mostly a wrong one where the engine has more slots than was said.
        """
        length = sample.estimated_length or sample.length
        new = sample.new if sample.estimated_new is None else max(min(sample.estimated_new, length), 1)
        point = self._point
        expected = point.ttft_s(new, length, sample.work)  # without a margin
        slot = self._slot_s(sample)
        if slot > expected / 2:
            return None
        seen = max((sample.ttft_s or 0.0) - slot, 0.0)
        return (seen - expected) / (expected + point.base_s + SCALE_S)

    def _itl_error(self, sample: Sample) -> float:
        length = sample.estimated_length or sample.length
        return (sample.itl_s or 0.0) - self._point.itl_s(length, sample.work)


def _itl_row(sample: Sample) -> Row:
    work = sample.work
    sequences, tokens = 1.0 + work.decoding, float(sample.length + work.context_tokens)
    return sequences, tokens, max(sample.itl_s or 0.0, _LEAST_S)


def _units(prior: Triple, least: Triple) -> Triple:
    return max(prior[0], least[0]), max(prior[1], least[1]), max(prior[2], least[2])
