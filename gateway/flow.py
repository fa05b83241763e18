"""The stages of one request as frozen types; each owns what it adds and carries the one before.

    Inbound -> Identified -> Allowed -> Planned -> Routed -> Held -> Answered -> Settled

Any stage may raise `Refused` instead. A retry or failover goes back to `Routed` with a new attempt.
"""

from __future__ import annotations

from enum import StrEnum
from fractions import Fraction
from typing import TYPE_CHECKING, Final

from ctxgate.inference.record import Record
from ctxgate.routing.snapshot import LatencyBudget
from ctxgate.routing.tiers import JobClass

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
    from ctxgate.routing.candidates import Candidate, RouteDecision
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
AS_USUAL: Final = Fraction(1)
NO_BUDGET: Final = LatencyBudget()


class Inbound(Record, frozen=True):
    """A request as it came in: its body checked, its sender not yet known.

    `messages` are the chat messages as raw slices of the body; empty on the other surfaces.
    """

    request_id: str
    surface: Surface
    headers: Mapping[str, str]
    body: Body
    messages: tuple[Raw, ...]
    model: str
    stream: bool
    received_at_us: int

    def __repr__(self) -> str:
        return f"Inbound({self.request_id}, {self.surface.value})"  # never a credential, a prompt


class Task(Record, frozen=True):
    """The job a request belongs to, and where its name was found. Namespaced under the key."""

    name: str
    source: str


class Identified(Record, frozen=True):
    """The sender, the task, and the root of the conversation (bytes that name its first messages).

    `job_class` is the class of its job, `budget` how long it may take from its arrival. `service_tier`: what
    its body says of it, None where it says nothing.
    """

    inbound: Inbound
    key: Key
    task: Task
    root: bytes
    job_class: str = JobClass.AGENT.value
    budget: LatencyBudget = NO_BUDGET
    service_tier: str | None = None


class Allowed(Record, frozen=True):
    """What the tenant may use: the model, and the pools that may serve it, the default first.

    `harder`: the share of a compaction's price that counts, and of its tail that is kept, by the step of a
    budget's ladder: 1 is as usual, less compacts earlier and deeper.
    """

    identified: Identified
    model: Model
    pools: tuple[Pool, ...]
    harder: Fraction = AS_USUAL


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
    """Where this attempt goes, and why.

    `prompt_tokens` estimates the prompt, `expected` is what the replica should find of it in its cache, and
    `available_tokens` what the warmest replica should, None where nothing is known of any. `budget`: what is
    left of the request's. `told_tokens`: what the replica's cache events say that it holds, None where they
    do not say it exactly.
    """

    planned: Planned
    decision: RouteDecision
    pool: Pool
    replica: Replica
    prompt_tokens: int = 0
    expected: Expected | None = None
    available_tokens: int | None = None
    budget: LatencyBudget = NO_BUDGET
    told_tokens: int | None = None

    @property
    def hit_tokens(self) -> int | None:
        """The tokens to be found in the cache: as told, else as expected; None where nothing is known."""
        if self.told_tokens is not None:
            return self.told_tokens
        return None if self.expected is None else self.expected.tokens

    @property
    def chosen(self) -> Candidate | None:
        """What was predicted of the attempt, None where nothing was."""
        candidates = self.decision.candidates
        return candidates[0] if candidates else None


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
