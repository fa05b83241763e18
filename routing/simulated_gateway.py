"""What the gateway of a simulation knows, and how it decides: never more than a real one could. Pure.

It remembers which prompts it sent where, up to what each cache holds; counts its open attempts; learns from
the times it saw how far predictions are off; and hands all that to `choose`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Final

from ctxgate.inference.record import Record
from ctxgate.routing.choose import choose
from ctxgate.routing.snapshot import Demand, PoolTerms, ReplicaState, Speed, Work

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ctxgate.inference import twin_profile
    from ctxgate.inference.rates import Rates
    from ctxgate.routing.choose import RouteDecision
    from ctxgate.routing.simulated_load import Task
    from ctxgate.routing.snapshot import Profile

_SAMPLES: Final = 256
_QUANTILE: Final = 0.9
_LIVE_S: Final = 600.0
_USUAL_OUTPUT: Final = 256  # tokens, before anything was seen


class PoolSetup(Record, frozen=True):
    """A pool of a simulated fleet: so many replicas with a cache of `kv_tokens` each."""

    name: str
    tuned: Profile
    profile: twin_profile.Profile
    replicas: int
    kv_tokens: int
    rates: Rates


class Attempt:
    """An open attempt as the gateway counts it."""

    __slots__ = ("at_s", "began", "decision", "new", "pairs", "place", "predicted_s", "tokens")

    def __init__(self, place: int, decision: RouteDecision, new: int, tokens: int, at_s: float) -> None:
        self.place = place
        self.decision = decision
        self.new = new
        self.pairs = int(new * (tokens - new / 2))
        self.tokens = tokens
        self.at_s = at_s
        self.began: float | None = None
        self.predicted_s = decision.candidates[0].ttft_s


class _Quantile:
    """The quantile of the latest values."""

    def __init__(self, otherwise: float) -> None:
        self._latest: deque[float] = deque()
        self._sorted: list[float] = []
        self._otherwise = otherwise

    def add(self, value: float) -> None:
        self._latest.append(value)
        insort(self._sorted, value)
        if len(self._latest) > _SAMPLES:
            del self._sorted[bisect_left(self._sorted, self._latest.popleft())]

    @property
    def value(self) -> float:
        if not self._sorted:
            return self._otherwise
        return self._sorted[min(int(_QUANTILE * len(self._sorted)), len(self._sorted) - 1)]


class _Pool:
    """What is known of a pool's speed."""

    def __init__(self, setup: PoolSetup, order: int) -> None:
        self.setup = setup
        self.order = order
        self.first = _Quantile(0.0)
        self.between = _Quantile(0.0)

    def terms(self) -> PoolTerms:
        setup, profile = self.setup, self.setup.profile
        speed = Speed(
            profile.linear_s,
            profile.attention_s,
            profile.step_s,
            profile.sequence_s,
            profile.context_s,
            rho_s=max(self.first.value, 0.0),
            itl_rho_s=max(self.between.value, 0.0),
            slots=profile.max_num_seqs,
        )
        return PoolTerms(setup.name, self.order, setup.tuned, setup.rates, speed)


class _Place:
    """One replica: the prompts sent there, and the attempts open there."""

    def __init__(self, pool: _Pool, name: str) -> None:
        self.pool = pool
        self.name = name
        self.sent: OrderedDict[int | str, int] = OrderedDict()  # task or head -> tokens, oldest use first
        self.held = 0  # the sum of these
        self.in_flight = 0
        self.prefill = 0
        self.pairs = 0
        self.live: OrderedDict[int | str, tuple[float, int]] = OrderedDict()  # task -> last use, tokens
        self.live_tokens = 0
        self.decoding = 0
        self.context = 0

    def hit(self, task: Task, tokens: int, block: int) -> int:
        shape = task.shape
        known = 0 if shape.head is None else min(self.sent.get(shape.head, 0), shape.head_tokens)
        if known == shape.head_tokens:
            known += self.sent.get(task.number, 0)
        return min(known, tokens - 1) // block * block

    def note(self, task: Task, tokens: int) -> None:
        shape = task.shape
        self._put(task.number, tokens - shape.head_tokens)
        if shape.head is not None:
            self._put(shape.head, shape.head_tokens)
        while self.held > self.pool.setup.kv_tokens:
            oldest = next(iter(self.sent))
            gone = min(self.held - self.pool.setup.kv_tokens, self.sent[oldest])
            self.held -= gone
            self.sent[oldest] -= gone
            if not self.sent[oldest]:
                del self.sent[oldest]

    def _put(self, key: int | str, tokens: int) -> None:
        self.held += tokens - self.sent.pop(key, 0)
        self.sent[key] = tokens

    def use(self, key: int | str, tokens: int, now: float) -> None:
        self.live_tokens += tokens - self.live.pop(key, (0.0, 0))[1]
        self.live[key] = now, tokens

    def state(self, hit: int, now: float) -> ReplicaState:
        while self.live:
            key = next(iter(self.live))
            at, tokens = self.live[key]
            if at > now - _LIVE_S:
                break
            del self.live[key]
            self.live_tokens -= tokens
        work = Work(self.prefill, self.decoding, self.context, prefill_pairs=self.pairs)
        setup = self.pool.setup
        return ReplicaState(
            setup.name,
            self.name,
            True,
            self.in_flight,
            False,
            work,
            setup.kv_tokens,
            hit,
            live_tokens=self.live_tokens,
        )


class Gateway:
    """The gateway: `choose` a place, then tell what becomes of the attempt."""

    def __init__(self, pools: Sequence[PoolSetup], policy: str, block: int) -> None:
        self.policy = policy
        self.block = block
        self._pools = [_Pool(setup, order) for order, setup in enumerate(pools)]
        self._places = [
            _Place(pool, f"{pool.setup.name}-{number}")
            for pool in self._pools
            for number in range(pool.setup.replicas)
        ]
        self._numbers = {place.name: at for at, place in enumerate(self._places)}
        self._outputs: dict[str, _Quantile] = {}
        self._turn = 0

    def choose(self, task: Task, call: int, now: float, tried: Collection[str]) -> Attempt | None:
        """Where a task's call goes; None where no replica is left."""
        tokens = task.shape.calls[call].prompt_tokens
        output = self._outputs.get(task.label)
        demand = Demand(
            f"task {task.number}".encode(),
            f"{task.number}-{call}",
            tokens,
            _USUAL_OUTPUT if output is None else int(output.value),
            task.budget,
            fresh=call == 0,
        )
        terms = {pool.setup.name: pool.terms() for pool in self._pools}
        states = [place.state(place.hit(task, tokens, self.block), now) for place in self._places]
        self._turn += 1
        decision = choose(demand, states, terms, tried, self.policy, turn=self._turn)
        if decision is None:
            return None
        number = self._numbers[decision.replica]
        return Attempt(number, decision, tokens - states[number].hit_tokens, tokens, now)

    def sent(self, attempt: Attempt, task: Task) -> None:
        """The replica took the attempt."""
        place = self._places[attempt.place]
        place.in_flight += 1
        place.prefill += attempt.new
        place.pairs += attempt.pairs
        place.note(task, attempt.tokens)
        place.use(task.number, attempt.tokens, attempt.at_s)

    def began(self, attempt: Attempt, now: float) -> None:
        """Its first token came."""
        place = self._places[attempt.place]
        attempt.began = now
        place.prefill -= attempt.new
        place.pairs -= attempt.pairs
        place.decoding += 1
        place.context += attempt.tokens
        if attempt.predicted_s is not None:
            first = place.pool.first
            unsure = max(first.value, 0.0)
            first.add(now - attempt.at_s - (attempt.predicted_s - unsure))

    def ended(self, attempt: Attempt, task: Task, output: int, now: float) -> None:
        """Its answer is complete."""
        place = self._places[attempt.place]
        place.in_flight -= 1
        place.decoding -= 1
        place.context -= attempt.tokens
        self._outputs.setdefault(task.label, _Quantile(_USUAL_OUTPUT)).add(output)
        if attempt.began is not None and output > 1:
            work = Work(0, place.decoding, place.context)
            speed = place.pool.terms().speed
            if speed is not None:
                usual = speed.itl_s(attempt.tokens, work) - speed.itl_rho_s
                place.pool.between.add((now - attempt.began) / (output - 1) - usual)
