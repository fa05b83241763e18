"""Calls of the gateway's own to one replica: attempts like any other, metered, priced and booked.

They belong to an organisation that no configuration can name, so that the ledger stays equal to the
engines' own counters. Here is also the client that stands in where the gateway itself is the one who asks.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ctxgate.compression.plan import PromptPlan
from ctxgate.compression.policy import Level
from ctxgate.gateway.attempt import Attempt
from ctxgate.gateway.config import Key
from ctxgate.gateway.edge import Reply
from ctxgate.gateway.errors import Refused
from ctxgate.gateway.flow import Allowed, Identified, Planned, Surface, Task
from ctxgate.gateway.inbound import read_inbound
from ctxgate.gateway.ledger import OWN_ORGANISATION
from ctxgate.gateway.metering import charge_of
from ctxgate.gateway.pipeline import Pipeline

if TYPE_CHECKING:
    from ctxgate.gateway.config import Model
    from ctxgate.gateway.edge import Message
    from ctxgate.gateway.fleet import ReplicaRecord
    from ctxgate.gateway.flow import Answered, Held
    from ctxgate.gateway.services import Services

KEY: Final = Key("ctxgate", b"", OWN_ORGANISATION, OWN_ORGANISATION)
TASK: Final = Task("probe", "gateway")


@dataclass(slots=True)
class Cost:
    """What calls have used: how many were answered, their tokens, nano-dollars where known."""

    calls: int = 0
    tokens: int = 0
    nano: int = 0

    def count(self, answered: Answered) -> None:
        """Add an answered call."""
        usage = answered.usage
        self.calls += 1
        self.tokens += (usage.prompt or 0) + (usage.output.value or 0)
        self.nano += charge_of(answered.held, usage).total or 0


class Listener:
    """A client that waits for so many seconds, then leaves, and keeps the answer's bytes."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self.body = bytearray()

    async def receive(self) -> Message:
        """Say nothing more, until it leaves."""
        await asyncio.sleep(self._patience_s)
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Take a part of the answer."""
        self.body += message.get("body", b"")


def own_call(services: Services, record: ReplicaRecord, model: Model, raw: bytes, task: Task = TASK) -> Held:
    """A chat call with the body `raw`, past every stage that decides something: where it goes is known."""
    pool, replica = record.pool, record.replica
    inbound = read_inbound(f"req_{services.new_id()}", Surface.CHAT, {}, raw, services.now_us())
    allowed = Allowed(Identified(inbound, KEY, task, b"ctxgate probe"), model, (pool,))
    planned = Planned(allowed, PromptPlan((raw,)), Level.OFF)
    return Pipeline(services).hold(services.routing.fixed(planned, pool, replica, "probe"), 1)


async def heard(services: Services, held: Held, patience_s: float) -> tuple[Answered, bytes] | None:
    """Make a call: how it ended, and its answer's bytes; None where it was refused or has no status 200."""
    listener = Listener(patience_s)
    reply = Reply(listener.receive, listener.send)
    reply.watch()
    try:
        answered = await Attempt(services, held, reply).run()
    except Refused:
        return None
    finally:
        reply.unwatch()
    return (answered, bytes(listener.body)) if answered.status == 200 else None
