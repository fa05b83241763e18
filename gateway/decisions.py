"""The latest routing decisions of this process, with every candidate and what came of each. Bounded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ctxgate.inference.usage import Certainty

if TYPE_CHECKING:
    from ctxgate.gateway.flow import Routed, Settled
    from ctxgate.routing.candidates import RouteDecision
    from ctxgate.routing.snapshot import LatencyBudget

KEPT: Final = 512  # requests


@dataclass(slots=True)
class Decision:
    """One attempt's decision, without its prompt. What came of it is None until that is known."""

    route: RouteDecision
    budget: LatencyBudget
    job_class: str
    estimated_prompt_tokens: int
    outcome: str | None = None
    ttft_us: int | None = None
    total_us: int | None = None
    cached_tokens: int | None = None
    prompt_tokens: int | None = None


@dataclass(slots=True)
class _Kept:
    """The decisions of one request, in their order, and whose it is."""

    tenant: tuple[str, str]
    attempts: list[Decision] = field(default_factory=list)


class Decisions:
    """By request id, the latest ones."""

    def __init__(self, kept: int = KEPT) -> None:
        self._most = kept
        self._requests: dict[str, _Kept] = {}

    def __len__(self) -> int:
        """How many requests are kept."""
        return len(self._requests)

    def keep(self, routed: Routed) -> None:
        """Keep a decision beside the earlier ones of its request."""
        identified = routed.planned.allowed.identified
        request_id = identified.inbound.request_id
        kept = self._requests.get(request_id)
        if kept is None:
            kept = _Kept((identified.key.organisation, identified.key.team))
            self._requests[request_id] = kept
            if len(self._requests) > self._most:
                del self._requests[next(iter(self._requests))]
        kept.attempts.append(
            Decision(routed.decision, routed.budget, identified.job_class, routed.prompt_tokens)
        )

    def settled(self, settled: Settled, total_us: int) -> None:
        """Note what came of an attempt."""
        answered = settled.answered
        held = answered.held
        kept = self._requests.get(held.attempt.request_id)
        for decision in () if kept is None else kept.attempts:
            if decision.route is held.routed.decision:
                usage = answered.usage
                decision.outcome = answered.outcome.value
                decision.ttft_us, decision.total_us = answered.ttft_us, total_us
                if usage.cached.certainty is Certainty.MEASURED:
                    decision.cached_tokens, decision.prompt_tokens = usage.cached.value, usage.prompt

    def of(self, request_id: str, organisation: str, team: str) -> list[dict[str, Any]] | None:
        """The decisions of one of a team's requests as plain values; None where it is not kept."""
        kept = self._requests.get(request_id)
        if kept is None or kept.tenant != (organisation, team):
            return None
        return [_plain(decision) for decision in kept.attempts]


def _plain(decision: Decision) -> dict[str, Any]:
    chosen, budget = decision.route, decision.budget
    return {
        "pool": chosen.pool,
        "replica": chosen.replica,
        "policy": chosen.policy,
        "reason": chosen.reason,
        "fits": chosen.fits,
        "class": decision.job_class,
        "budget": {name: getattr(budget, name) for name in budget.__struct_fields__},
        "estimated_prompt_tokens": decision.estimated_prompt_tokens,
        "candidates": [
            {name: getattr(one, name) for name in one.__struct_fields__} for one in chosen.candidates
        ],
        "outcome": decision.outcome,
        "ttft_us": decision.ttft_us,
        "total_us": decision.total_us,
        "reported_prompt_tokens": decision.prompt_tokens,
        "reported_cached_tokens": decision.cached_tokens,
    }
