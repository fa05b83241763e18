"""The choice of a replica for one attempt: pure, on a snapshot, with the reasons kept.

Today's policy is rendezvous hashing of the conversation's root over the replicas of one pool: every
gateway process sends a conversation to the same replica, where its prefix is warm, and a lost replica
moves only its own conversations, spread over the others.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

from ctxgate.inference.record import Record

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ctxgate.routing.snapshot import ReplicaState


class Candidate(Record, frozen=True):
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


class RouteDecision(Record, frozen=True):
    """The chosen replica and every candidate, best first; `fits`: it meets the latency budget as predicted."""

    pool: str
    replica: str
    policy: str
    candidates: tuple[Candidate, ...]
    fits: bool | None = None
    reason: str = ""


def rendezvous_score(root: bytes, pool: str, replica: str) -> float:
    """A number in [0, 1), fixed for a pair of conversation root and replica (highest random weight)."""
    digest = blake2b(f"{pool}\0{replica}".encode(), key=root[:64], digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def choose(
    root: bytes, snapshot: Sequence[ReplicaState], tried: Collection[str] = ()
) -> RouteDecision | None:
    """The first healthy, untried replica in the root's rendezvous order; None when there is none.

    Where no replica is healthy, the best untried one is tried all the same: a probe may be wrong, and
    a refusal that the engine would not have made is worse than one more failed attempt.
    """
    ranked = sorted(
        (
            Candidate(
                s.pool,
                s.name,
                rendezvous_score(root, s.pool, s.name),
                "tried" if s.name in tried else None if s.healthy else "unhealthy",
            )
            for s in snapshot
        ),
        key=lambda c: (c.excluded is not None, c.excluded == "tried", -c.score),
    )
    if not ranked or ranked[0].excluded == "tried":
        return None
    best = ranked[0]
    return RouteDecision(best.pool, best.replica, "rendezvous", tuple(ranked))
