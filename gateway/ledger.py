"""The ledger's rows and port: one row per attempt, opened before the call, settled exactly once."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from asyncio import Future
    from collections.abc import Iterable, Mapping

    from ctxgate.inference.rates import Charge
    from ctxgate.inference.usage import Usage


class Outcome(StrEnum):
    """How an attempt ended. Decided at the end of the answer, never at its first byte."""

    COMPLETED = "completed"
    CLIENT_DISCONNECTED = "client_disconnected"
    REJECTED = "rejected"  # the engine refused the request: a 4xx
    OVERLOADED = "overloaded"  # the engine had no room: a 429 or 503 before the first byte
    UPSTREAM_ERROR = "upstream_error"  # a 5xx, or an error event inside a stream
    TRUNCATED = "truncated"  # the connection died after the answer had begun
    UNREACHABLE = "unreachable"  # no answer at all: refused, reset or timed out before the first byte
    CRASHED = "crashed"  # the gateway died while the attempt was open; found at the next start
    FAILED = "failed"  # a defect of the gateway


@dataclass(frozen=True, slots=True)
class AttemptOpened:
    """What is known when an attempt is dispatched. Times are Unix microseconds."""

    attempt_id: str
    request_id: str
    attempt_number: int
    organisation: str
    team: str
    key_id: str
    task: str
    task_source: str
    surface: str
    model: str
    pool: str
    replica: str
    stream: bool
    body_bytes: int
    opened_at_us: int
    predicted_cached_tokens: int | None = None
    estimated_prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class AttemptSettled:
    """How an attempt ended. Durations are microseconds since `opened_at_us`."""

    attempt_id: str
    outcome: Outcome
    status: int | None
    finish_reason: str | None
    ttft_us: int | None
    total_us: int
    settled_at_us: int
    usage: Usage
    charge: Charge


@dataclass(frozen=True, slots=True)
class ReportRow:
    """Sums over the settled attempts of one group.

    Token and money sums run over the known figures; `unknown_*` count the attempts they leave out,
    and `estimated` those in which a figure was estimated.
    """

    group: str
    requests: int
    attempts: int
    cached_tokens: int
    uncached_tokens: int
    output_tokens: int
    reasoning_tokens: int
    cost_nano: int
    estimated: int
    unknown_tokens: int
    unknown_cost: int


class Ledger(Protocol):
    """Where attempts are written. Both steps are idempotent by attempt id."""

    def open(self, row: AttemptOpened) -> Future[None]:
        """Queue the opening row; the future resolves when it is durable."""
        ...

    def settle(self, row: AttemptSettled) -> Future[bool]:
        """Queue the settlement; resolves when durable, False if the attempt was already settled."""
        ...

    async def report(
        self, by: str, *, where: Mapping[str, str] | None = None, since_us: int = 0, until_us: int | None = None
    ) -> list[ReportRow]:
        """Sums of settled attempts grouped by task, team, pool, model or day (UTC)."""
        ...

    async def recover(self) -> Iterable[str]:
        """Settle as crashed what dead gateway processes left open; returns those attempt ids."""
        ...

    async def close(self) -> None:
        """Write everything that is queued, then close."""
        ...
