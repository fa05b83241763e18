"""The replicas that an attempt may go to, and what is predicted of it there: what every policy decides on."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, overload

from ctxgate.inference.rates import TOKENS_PER_RATE
from ctxgate.inference.record import Record

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from ctxgate.inference.rates import Rates
    from ctxgate.routing.snapshot import Demand, PoolTerms, ReplicaState, Speed

TRIED = "tried"
DRAINING = "draining"
UNHEALTHY = "unhealthy"
CROWDED = "crowded"


class Candidate(Record, frozen=True, gc=False):
    """A replica with the score that ranked it; the highest wins. `excluded` says why it may not.

    What is predicted of the attempt there: cached tokens, seconds to the first and to the last token, its
    price in nano-dollars, and whether it `fits` the latency budget; None where that is not known.
    """

    pool: str
    replica: str
    score: float
    excluded: str | None = None
    hit_tokens: int = 0
    ttft_s: float | None = None
    total_s: float | None = None
    cost_nano: int | None = None
    fits: bool | None = None


class Candidates(Sequence[Candidate]):
    """The candidates of a decision, best first: all but the chosen one are made when they are read.

    A request needs none of the others, and `ctxgate explain` all of them.
    """

    __slots__ = ("_chosen", "_made", "_make", "_number")

    def __init__(self, chosen: Candidate, number: int, make: Callable[[], Iterable[Candidate]]) -> None:
        """`make` makes all of them, `number` says how many that will be."""
        self._chosen = chosen
        self._number = number
        self._make: Callable[[], Iterable[Candidate]] | None = make
        self._made: tuple[Candidate, ...] = ()

    @property
    def all(self) -> tuple[Candidate, ...]:
        """Every one."""
        if self._make is not None:
            self._made, self._make = tuple(self._make()), None
        return self._made

    def __len__(self) -> int:
        return self._number

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self.all)

    @overload
    def __getitem__(self, at: int) -> Candidate: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Candidate, ...]: ...
    def __getitem__(self, at: int | slice) -> Candidate | tuple[Candidate, ...]:
        return self._chosen if at == 0 else self.all[at]


class RouteDecision(Record, frozen=True):
    """The chosen replica and every candidate, best first; `fits`: as predicted, it meets the budget.

    `leaving_nano`: what the attempt costs more there than at the replica that holds most of its prompt.
    """

    pool: str
    replica: str
    policy: str
    candidates: Sequence[Candidate]
    fits: bool | None = None
    reason: str = ""
    leaving_nano: int = 0


class Open(Record, frozen=True, gc=False):
    """A replica that the attempt may go to, and what is predicted of it there; None: not known.

    `wait_s` is the part of `ttft_s` that is spent behind others. `fits` is True where there is no bound;
    `used` is how much of the tightest bound the prediction takes, 0 where there is none.
    """

    state: ReplicaState
    terms: PoolTerms | None
    hit: int
    wait_s: float | None
    ttft_s: float | None
    total_s: float | None
    cost_nano: int | None
    fits: bool | None
    used: float

    def candidate(self, score: float) -> Candidate:
        """As it is kept with the decision."""
        state = self.state
        return Candidate(
            state.pool,
            state.name,
            score,
            None if state.healthy else UNHEALTHY,
            self.hit,
            self.ttft_s,
            self.total_s,
            self.cost_nano,
            self.fits,
        )


def divide(
    snapshot: Sequence[ReplicaState], tried: Collection[str]
) -> tuple[list[ReplicaState], list[Candidate]]:
    """The replicas that an attempt may go to, and the others with the reason.

    Where no replica is healthy, the others are tried all the same: a probe may be wrong, and a refusal that
    the engine would not have made is worse than one more failed attempt. One that drains takes nothing new.
    """
    healthy: list[ReplicaState] = []
    unhealthy: list[ReplicaState] = []
    out: list[Candidate] = []
    for state in snapshot:
        if state.name in tried:
            out.append(Candidate(state.pool, state.name, 0.0, TRIED, state.hit_tokens))
        elif state.draining:
            out.append(Candidate(state.pool, state.name, 0.0, DRAINING, state.hit_tokens))
        elif state.healthy:
            healthy.append(state)
        else:
            unhealthy.append(state)
    if not healthy:
        return unhealthy, out
    out[:0] = [Candidate(s.pool, s.name, 0.0, UNHEALTHY, s.hit_tokens) for s in unhealthy]
    return healthy, out


def predict(demand: Demand, states: Sequence[ReplicaState], pools: Mapping[str, PoolTerms]) -> list[Open]:
    """What each replica would make of the attempt."""
    found: list[Open] = []
    done, last = 0, len(states)
    while done < last:
        name, begin = states[done].pool, done
        while done < last and states[done].pool == name:
            done += 1
        group = states if done - begin == last else states[begin:done]
        terms = pools.get(name)
        if terms is None or terms.speed is None:
            found += _untimed(demand, group, terms)
        else:
            found += _timed(demand, group, terms, terms.speed)
    return found


def _untimed(demand: Demand, states: Iterable[ReplicaState], terms: PoolTerms | None) -> list[Open]:
    """For replicas of one pool whose speed is not known."""
    length, rates = demand.prompt_tokens, None if terms is None else terms.rates
    fits = None if demand.budget.bounds else True
    most_hit = max(length - 1, 0)
    found: list[Open] = []
    for state in states:
        hit = min(state.hit_tokens, most_hit)
        cost = None if rates is None else price(length - hit, hit, demand.output_tokens, rates)
        found.append(Open(state, terms, hit, None, None, None, cost, fits, 0.0))
    return found


def _timed(demand: Demand, states: Iterable[ReplicaState], terms: PoolTerms, speed: Speed) -> list[Open]:
    """For replicas of one pool: what is the same for all, and for all of one hit, is worked out once.

    The times are `Speed.queue_s`, `ttft_s` and `itl_s` written out: for each replica of each request, three
    calls take as long as all the sums.
    """
    length, output, rates, budget = demand.prompt_tokens, demand.output_tokens, terms.rates, demand.budget
    first_us, last_us, slots = budget.ttft_us, budget.total_us, speed.slots
    more, most_hit = max(output - 1, 0), max(length - 1, 0)
    linear, attention, base, share = speed.linear_s, speed.attention_s, speed.base_s, speed.rho_share
    rho, step, sequence, context, itl_rho = (
        speed.rho_s, speed.step_s, speed.sequence_s, speed.context_s, speed.itl_rho_s,
    )  # fmt: skip
    own: dict[int, tuple[int | None, float]] = {}  # by hit: the price, and the seconds of its own prefill
    fits, used = True, 0.0
    found: list[Open] = []
    for state in states:
        work, ahead, hit = state.work, state.in_flight, state.hit_tokens
        if hit not in own:
            hit = min(hit, most_hit)
            cost = None if rates is None else price(length - hit, hit, output, rates)
            own[hit] = cost, speed.prefill_s(length - hit, length)
        cost, prefill = own[hit]
        wait = linear * work.prefill_tokens + attention * work.prefill_pairs
        expected = wait + base + prefill
        ttft = expected + share * expected + rho
        ttft = ttft if ttft > 0.0 else 0.0  # quicker than max()
        waiting = work.waiting
        if (waiting or work.running) and (told := (work.running or 0) + (waiting or 0)) > ahead:
            ahead = told  # of all its clients
        if waiting if slots is None else ahead >= slots:
            slot = speed.slot_s(output, length, work, ahead)
            wait, ttft = wait + slot, ttft + slot
        itl = step + sequence * (1 + work.decoding) + context * (length + work.context_tokens) + itl_rho
        total = ttft + more * itl
        if first_us is not None:
            used = ttft * 1e6 / (first_us or 1)  # of one that is spent, more than of any other
            fits = used <= 1.0
        if last_us is not None:
            part = total * 1e6 / (last_us or 1)
            used = part if first_us is None or part > used else used
            fits = used <= 1.0
        found.append(Open(state, terms, hit, wait, ttft, total, cost, fits, used))
    return found


def price(new: int, hit: int, output: int, rates: Rates) -> int:
    """Nano-dollars of so many uncached, cached and output tokens, each component rounded half up."""
    half = TOKENS_PER_RATE // 2
    return (
        (new * rates.uncached + half) // TOKENS_PER_RATE
        + (hit * rates.cached + half) // TOKENS_PER_RATE
        + (output * rates.output + half) // TOKENS_PER_RATE
    )


def rendezvous_score(root: bytes, pool: str, replica: str) -> float:
    """A number in [0, 1), fixed for a pair of conversation root and replica (highest random weight)."""
    digest = blake2b(f"{pool}\0{replica}".encode(), key=root[:64], digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def digests(key: bytes, states: Iterable[ReplicaState]) -> list[bytes]:
    """For each replica what it is hashed to by the key: those of a root are in the order of their scores."""
    copy = blake2b(key=key[:64], digest_size=8).copy
    found: list[bytes] = []
    for state in states:
        digest = copy()
        digest.update(f"{state.pool}\0{state.name}".encode())
        found.append(digest.digest())
    return found
