"""The stages of one request as frozen types; each owns what it adds and carries the one before.

    Inbound -> Identified -> Allowed -> Planned -> Routed -> Held -> Answered -> Settled

Any stage may raise `Refused` instead. A retry or failover goes back to `Routed` with a new attempt.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from ctxgate.inference.record import Record

if TYPE_CHECKING:
    from collections.abc import Mapping

    from msgspec import Raw

    from ctxgate.compression.plan import PromptPlan
    from ctxgate.compression.policy import Level
    from ctxgate.compression.window_errors import Overflow
    from ctxgate.gateway.config import Key, Model, Pool, Replica
    from ctxgate.gateway.context_turn import Turn
    from ctxgate.gateway.ledger import AttemptOpened, Outcome
    from ctxgate.gateway.miss import Miss
    from ctxgate.gateway.seen import Seen
    from ctxgate.inference.rates import Charge
    from ctxgate.inference.usage import Usage
    from ctxgate.inference.wire import Body
    from ctxgate.routing.choose import RouteDecision
    from ctxgate.routing.prefix_index import Expected


class Surface(StrEnum):
    """The endpoint a request came in by."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"


PATHS: Final[Mapping[str, Surface]] = {
    "/v1/chat/completions": Surface.CHAT,
    "/v1/completions": Surface.COMPLETIONS,
    "/v1/embeddings": Surface.EMBEDDINGS,
}
UPSTREAM_PATHS: Final[Mapping[Surface, str]] = {surface: path for path, surface in PATHS.items()}


@dataclass(frozen=True, slots=True)
class Inbound:
    """A request as it came in: its body checked, its sender not yet known.

    `messages` are the chat messages as raw slices of the body; empty on the other surfaces.
    """

    request_id: str
    surface: Surface
    headers: Mapping[str, str] = field(repr=False)
    body: Body
    messages: tuple[Raw, ...] = field(repr=False)
    model: str
    stream: bool
    received_at_us: int


class Task(Record, frozen=True):
    """The job a request belongs to, and where its name was found. Namespaced under the key."""

    name: str
    source: str


class Identified(Record, frozen=True):
    """The sender, the task, and the root of the conversation (bytes that name its first messages)."""

    inbound: Inbound
    key: Key
    task: Task
    root: bytes


class Allowed(Record, frozen=True):
    """What the tenant may use: the model, and the pools that may serve it, the default first."""

    identified: Identified
    model: Model
    pools: tuple[Pool, ...]


class Planned(Record, frozen=True):
    """The outgoing prompt, the layout level it was planned at, and what is known of it and those before it.

    `seen` is None where a prompt cannot be followed: embeddings, and several prompts in one call. `turn` is
    what the context stage knows of it, None where it had nothing to do with it. `origin`: the request that
    this call of the gateway's own is made for.
    """

    allowed: Allowed
    plan: PromptPlan
    level: Level
    seen: Seen | None = None
    turn: Turn | None = None
    may_shrink: bool = False  # a prompt that the engine refuses as too long may be tried again, shorter
    origin: Turn | None = None


class Routed(Record, frozen=True):
    """Where this attempt goes, and why."""

    planned: Planned
    decision: RouteDecision
    pool: Pool
    replica: Replica


class Held(Record, frozen=True):
    """The attempt as the ledger knows it from now on, and what its replica should find in its cache."""

    routed: Routed
    attempt: AttemptOpened
    expected: Expected | None = None


class Answered(Record, frozen=True):
    """How the attempt ended.

    `retriable`: no byte reached the client and another try may help. `connection_lost`: the connection
    broke after the request went out and before any answer, as an idle one does that the server was just
    closing; then the same replica is worth one more try. `overflow`: the engine refused the prompt as too
    long, and the client has not been told.
    """

    held: Held
    outcome: Outcome
    status: int | None
    finish_reason: str | None
    ttft_us: int | None
    usage: Usage
    retriable: bool = False
    connection_lost: bool = False
    overflow: Overflow | None = None


class Settled(Record, frozen=True):
    """The attempt's price, and why it missed the cache, as booked."""

    answered: Answered
    charge: Charge
    miss: Miss | None = None
