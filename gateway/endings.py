"""How a request ends that no attempt has answered, and what ends one before a further attempt is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ctxgate.gateway.attempt import OVERLOAD
from ctxgate.gateway.edge import JSON
from ctxgate.gateway.errors import Kind, Refused

if TYPE_CHECKING:
    from ctxgate.gateway.attempt import Attempt
    from ctxgate.gateway.edge import Reply
    from ctxgate.routing.snapshot import LatencyBudget

UNBOOKABLE: Final = Refused(Kind.LEDGER_UNAVAILABLE, "The ledger takes no requests now.", retry_after_s=2)

DRAINING: Final = Refused(
    Kind.POOL_DRAINING, "The model's servers are being drained and take nothing new.", retry_after_s=5
)


def check_time(budget: LatencyBudget, spent_us: int) -> None:
    """Raise `Refused` where a request's whole time is over, so that no further attempt can be in time."""
    if budget.total_us is not None and spent_us >= budget.total_us:
        message = f"The request's {budget.total_us // 1000} ms were over before a model server answered it."
        raise Refused(Kind.LATENCY_EXCEEDED, message)


async def last_word(attempt: Attempt | None, reply: Reply, *, draining: bool = False) -> None:
    """Tell the client that no attempt succeeded: the engine's own error if there was one.

    `draining`: no attempt was made because every replica takes nothing new.
    """
    if reply.gone:
        return
    if draining:
        raise DRAINING.fresh()
    if attempt is None:
        raise Refused(Kind.UPSTREAM_UNREACHABLE, "No replica can be chosen for this model.", retry_after_s=2)
    if attempt.refusal is None:
        raise Refused(Kind.UPSTREAM_UNREACHABLE, "No model server could be reached.", retry_after_s=2)
    status, body = attempt.refusal
    if status in OVERLOAD:
        raise Refused(
            Kind.OVERLOADED, "The model servers have no room for this request now.", retry_after_s=2
        )
    await reply.whole(status, [JSON, *attempt.headers()], body)
