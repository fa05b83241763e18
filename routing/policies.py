"""Routing policies that others use: for comparison, and as options.

Each is given the replicas that are open to the attempt with what is predicted there, the demand and a
count of decisions, and returns them best first, each with its score; the highest wins. They look at all
replicas of all pools as if these were of one kind, and neither at prices nor at latency budgets.
"""

from __future__ import annotations

from hashlib import blake2b
from math import ceil
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, TypeAlias

from ctxgate.routing.candidates import rendezvous_score

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ctxgate.routing.candidates import Open
    from ctxgate.routing.snapshot import Demand

Ranked: TypeAlias = "list[tuple[Open, float]]"
Policy: TypeAlias = "Callable[[Sequence[Open], Demand, int], Ranked]"

CTXGATE: Final = "ctxgate"
SESSION_BOUND: Final = 1.25
"""A session's home takes so many times the mean of open attempts, rounded up, and no more."""


def random_order(found: Sequence[Open], demand: Demand, _turn: int) -> Ranked:
    """Any of them, by the request's id."""
    return _sorted(found, [_drawn(one, demand) for one in found])


def round_robin(found: Sequence[Open], _demand: Demand, turn: int) -> Ranked:
    """One after the other, in the snapshot's order."""
    number = len(found)
    return _sorted(found, [-float((at - turn) % number) for at in range(number)])


def least_load(found: Sequence[Open], demand: Demand, _turn: int) -> Ranked:
    """The fewest open attempts; ties by the request's id."""
    return _sorted(found, [-one.state.in_flight + _drawn(one, demand) / 2 for one in found])


def session_hash(found: Sequence[Open], demand: Demand, _turn: int) -> Ranked:
    """Rendezvous hashing of the conversation's root, bounded by load; full ones come after the others."""
    most = ceil(SESSION_BOUND * (1 + sum(one.state.in_flight for one in found)) / len(found))
    return _sorted(
        found,
        [
            rendezvous_score(demand.root, one.state.pool, one.state.name) - (one.state.in_flight >= most)
            for one in found
        ],
    )


def cache_aware(match: float, absolute: int, relative: float) -> Policy:
    """The longest cached prefix, unless loads are uneven.

    Uneven: the most open attempts exceed the fewest by more than `absolute` and by more than `relative`
    times; then the fewest win. A prefix shorter than `match` of the prompt counts for nothing, and the
    replica that holds the least is taken: here the one with the fewest open attempts, as what a replica
    holds in all is not known.
    """

    def policy(found: Sequence[Open], demand: Demand, turn: int) -> Ranked:
        loads = [one.state.in_flight for one in found]
        longest = max(one.hit for one in found)
        uneven = max(loads) - min(loads) > absolute and max(loads) > relative * min(loads)
        if uneven or longest <= match * demand.prompt_tokens:
            return least_load(found, demand, turn)
        return _sorted(found, [one.hit + _drawn(one, demand) / 2 for one in found])

    return policy


def lmetric(found: Sequence[Open], demand: Demand, _turn: int) -> Ranked:
    """The least product of the tokens to prefill there, the attempt's own among them, and the attempts."""
    length = demand.prompt_tokens
    return _sorted(
        found,
        [
            -float((one.state.work.prefill_tokens + length - one.hit) * (one.state.in_flight + 1))
            + _drawn(one, demand) / 2
            for one in found
        ],
    )


BASELINES: Final[Mapping[str, Policy]] = MappingProxyType(
    {
        "random": random_order,
        "round-robin": round_robin,
        "least-load": least_load,
        "session-hash": session_hash,
        "cache-aware": cache_aware(0.3, 64, 1.5),
        "cache-aware-tight": cache_aware(0.5, 32, 1.1),
        "lmetric": lmetric,
    }
)
"""By name; the two `cache-aware` have the two sets of defaults that are published."""

POLICIES: Final = (CTXGATE, *BASELINES)


def _sorted(found: Sequence[Open], scores: Sequence[float]) -> Ranked:
    return sorted(zip(found, scores, strict=True), key=lambda each: -each[1])


def _drawn(one: Open, demand: Demand) -> float:
    """A number in [0, 1), fixed for a pair of request and replica."""
    key = demand.request_id.encode()[:64]
    digest = blake2b(f"{one.state.pool}\0{one.state.name}".encode(), key=key, digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
