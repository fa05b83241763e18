"""How fast each pool is and how long answers are, learned from attempts as they are settled.

    settled attempt ──> Sample      tokens as counted, times as measured, the engine's own figures where it
                                    reports them (vLLM: --enable-per-request-metrics)
                    ──> Predictor   one for each pool: pools of different hardware never share one
                    ──> OutputLengths

Nothing here fails a request.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from ctxgate.gateway.context_terms import asked_output, latency_of
from ctxgate.gateway.flow import Surface
from ctxgate.gateway.ledger import ANSWER, Outcome
from ctxgate.inference.usage import Certainty
from ctxgate.routing.latency import Predictor, Sample
from ctxgate.routing.output_length import OutputLengths
from ctxgate.routing.snapshot import IDLE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ctxgate.compression.serving_cost import Latency
    from ctxgate.gateway.config import Pool
    from ctxgate.gateway.context_turn import Turn
    from ctxgate.gateway.flow import Answered, Identified
    from ctxgate.routing.snapshot import Speed, Work

log = logging.getLogger(__name__)
AT_ONCE: Final = 512
PER_S: Final = 50
_CUT: Final = "length"  # the finish reason of an answer that its limit ended
_EARLY: Final = frozenset({Outcome.COMPLETED, Outcome.CLIENT_DISCONNECTED, Outcome.TRUNCATED})
_Ms = Annotated[float, msgspec.Meta(ge=0, le=86_400_000)]


class EngineTimes(msgspec.Struct, frozen=True, gc=False):
    """An engine's own times of one call, in milliseconds; None where it did not tell.

    `queue_time_ms`: until it was scheduled. `time_to_first_token_ms`: from then on. `generation_time_ms`:
    from the first token to the last, `mean_itl_ms` the mean between two.
    """

    time_to_first_token_ms: _Ms | None = None
    queue_time_ms: _Ms | None = None
    generation_time_ms: _Ms | None = None
    mean_itl_ms: _Ms | None = None


UNTOLD: Final = EngineTimes()
_decode: Final = msgspec.json.Decoder(EngineTimes | None).decode


def engine_times(metrics: bytes | None) -> EngineTimes:
    """The times in the `metrics` of an answer, raw JSON; what is not as expected counts as not told."""
    if metrics is None:
        return UNTOLD
    try:
        return _decode(metrics) or UNTOLD
    except (msgspec.DecodeError, RecursionError):
        return UNTOLD


class _Pace:
    """Lets so many attempts of a pool teach at once, and so many a second: others tell nothing new.

    A fit of a thousand short requests a second would cost more than all else that is done for them.
    """

    __slots__ = ("_at_us", "_left")

    def __init__(self) -> None:
        self._left = float(AT_ONCE)
        self._at_us = 0

    def allows(self, at_us: int) -> bool:
        """Whether an attempt of this time may teach."""
        if at_us > self._at_us:
            self._left = min(self._left + (at_us - self._at_us) * PER_S / 1e6, float(AT_ONCE))
            self._at_us = at_us
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Speeds:
    """What is predicted of pools and answers. Belongs to one event loop."""

    def __init__(self, pools: Iterable[Pool] = ()) -> None:
        self._predictors: dict[str, Predictor] = {}
        self._told: dict[str, Speed | None] = {}  # as configured
        self._paces: dict[str, _Pace] = {}
        self.lengths = OutputLengths()
        self.update(pools)

    def update(self, pools: Iterable[Pool]) -> None:
        """Have these pools from now on. What was learned of one stays while its figures do."""
        told = {pool.name: pool.speed for pool in pools}
        old = self._predictors
        self._predictors = {
            name: old[name] if name in old and self._told[name] == speed else Predictor(speed)
            for name, speed in told.items()
        }
        self._told = told

    def of(self, pool: Pool) -> Speed | None:
        """How fast a pool's replicas are; None while nothing is known of it."""
        return self._of(pool).speed()

    def _of(self, pool: Pool) -> Predictor:
        """The pool's predictor; pools may come while the gateway runs."""
        predictor = self._predictors.get(pool.name)
        if predictor is None:
            predictor = self._predictors[pool.name] = Predictor(pool.speed)
        return predictor

    def latency(self, turn: Turn) -> Latency | None:
        """What decides whether a prompt is too long for its request's latency budget.

        It goes by the pool that would compute the whole of it soonest: while one pool is in time, the
        length is not what is wrong. None without a bound, and where a pool's speed is unknown.
        """
        identified, length = turn.identified, turn.estimate.tokens
        if not identified.budget.bounds:
            return None
        known: list[Speed] = []
        for name in turn.model.pools:
            predictor = self._predictors.get(name)
            speed = None if predictor is None else predictor.speed()
            if speed is None:
                return None
            known.append(speed)
        soonest = min(known, key=lambda speed: speed.ttft_s(length, length, IDLE))
        return latency_of(identified.budget, soonest, self.output_tokens(identified))

    def output_tokens(self, identified: Identified) -> int:
        """The length to expect of a request's answer, in tokens; never above what it allows."""
        inbound = identified.inbound
        if inbound.surface is Surface.EMBEDDINGS:
            return 0
        limit = asked_output(inbound.body)
        return self.lengths.expected(identified.key.team, inbound.model, identified.job_class, limit)

    def learned(
        self,
        answered: Answered,
        total_us: int,
        metrics: bytes | None = None,
        work: Work = IDLE,
        in_flight: int = 0,
    ) -> None:
        """Learn from a settled attempt. Never raises.

        `total_us`: microseconds from its dispatch to its end. `metrics`: the engine's own, raw JSON.
        `work` and `in_flight`: the load of its replica when it was chosen, itself not counted.
        """
        try:
            self._learned(answered, total_us, metrics, work, in_flight)
        except Exception as error:  # noqa: BLE001 - no defect in predicting may leave an attempt unbooked
            log.error("cannot learn from an attempt: %s", type(error).__name__)

    def _learned(
        self, answered: Answered, total_us: int, metrics: bytes | None, work: Work, in_flight: int
    ) -> None:
        usage, held = answered.usage, answered.held
        inbound = held.routed.planned.allowed.identified.inbound
        known = usage.uncached.certainty is Certainty.MEASURED and usage.prompt
        if not known or answered.outcome not in _EARLY or inbound.surface is Surface.EMBEDDINGS:
            return
        self._learn_length(answered)
        if not self._paces.setdefault(held.routed.pool.name, _Pace()).allows(held.attempt.opened_at_us):
            return
        sample = sample_of(answered, total_us, engine_times(metrics), work, in_flight)
        self._of(held.routed.pool).observe(sample)

    def _learn_length(self, answered: Answered) -> None:
        """Only of whole answers to clients: a summary's length is set by the gateway."""
        output, row = answered.usage.output, answered.held.attempt
        if answered.outcome is not Outcome.COMPLETED or row.purpose != ANSWER:
            return
        if output.certainty is Certainty.MEASURED and output.value:
            job_class = answered.held.routed.planned.allowed.identified.job_class
            cut = answered.finish_reason == _CUT
            self.lengths.learn(row.team, row.model, job_class, output.value, cut=cut)


def sample_of(
    answered: Answered, total_us: int, times: EngineTimes, work: Work = IDLE, in_flight: int = 0
) -> Sample:
    """What an attempt with a measured prompt says of its pool's speed.

    The first token of a stream is timed here. An answer in one piece shows none: the engine's generation
    time is taken off its end, where that is told.
    """
    usage, routed = answered.usage, answered.held.routed
    length, new = usage.prompt or 0, usage.uncached.value or 0
    output = (usage.output.value or 0) if usage.output.certainty is Certainty.MEASURED else 0
    generation = times.generation_time_ms
    ttft_s: float | None = None
    if answered.held.attempt.stream:
        ttft_s = None if answered.ttft_us is None else answered.ttft_us / 1e6
    elif generation is not None:
        ttft_s = max(total_us / 1e6 - generation / 1e3, 0.0)
    itl_s = None if times.mean_itl_ms is None else times.mean_itl_ms / 1e3
    if itl_s is None and output > 1:
        if generation is not None:
            itl_s = generation / 1e3 / (output - 1)
        elif ttft_s is not None and answered.outcome is Outcome.COMPLETED:
            itl_s = max(total_us / 1e6 - ttft_s, 0.0) / (output - 1)
    estimated, hit = routed.prompt_tokens, routed.hit_tokens or 0
    return Sample(
        new=new,
        length=length,
        ttft_s=ttft_s,
        queue_s=None if times.queue_time_ms is None else times.queue_time_ms / 1e3,
        output=output,
        itl_s=itl_s if output > 1 else None,
        work=work,
        in_flight=in_flight,
        estimated_new=max(estimated - hit, 0) if estimated else None,
        estimated_length=estimated or None,
    )
