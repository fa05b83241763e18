"""The ledger's rows and port: one row per attempt, opened before the call, settled exactly once."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Protocol

from ctxgate.inference.record import Record

if TYPE_CHECKING:
    from asyncio import Future
    from collections.abc import Iterable, Mapping

    from ctxgate.gateway.miss import Miss, MissCause
    from ctxgate.inference.rates import Charge
    from ctxgate.inference.usage import Usage

GROUPINGS: Final = ("task", "team", "pool", "model", "day", "cause", "class")
"""What a report may be grouped by. `EVERYTHING` gives one row over all of it."""

EVERYTHING: Final = "total"

OWN_ORGANISATION: Final = "ctxgate"
"""Whom the gateway's own calls are booked to, such as those of a probe; no configuration can name it."""

FILTERS: Final = ("organisation", "team", "key_id", "task", "pool", "model")
"""The columns a report may be narrowed by."""


ANSWER: Final = "answer"
LOOK_UP: Final = "recall"
PURPOSES: Final = (ANSWER, "summary", LOOK_UP)
"""What an attempt was for: the client's own request, or a call of the gateway, booked to the task."""


class LedgerError(Exception):
    """Base of what can go wrong with a ledger.

    LedgerError
     +-- LedgerUnavailable   the store did not take the write
     +-- LedgerClosed        a write after `close()`
     +-- UnknownAttempt      a settlement of an attempt that was never opened
     +-- AttemptConflict     an attempt id that was opened before with other contents
     +-- InvalidRow          contents that the store cannot hold
     +-- SchemaMismatch      the file is not a ledger, or of a version this program cannot use
    """


class LedgerUnavailable(LedgerError):
    """The store did not take the write: disk full, locked for too long, or damaged."""


class LedgerClosed(LedgerError):
    """A write after `close()`."""


class UnknownAttempt(LedgerError):
    """A settlement of an attempt that was never opened: a defect of the caller."""


class AttemptConflict(LedgerError):
    """An attempt id that was opened before with other contents: a defect of the caller."""


class InvalidRow(LedgerError):
    """Contents that the store cannot hold, such as an integer beyond 64 bits: a defect of the caller."""


class SchemaMismatch(LedgerError):
    """The file is not a ledger, or of a version this program cannot use."""


class Outcome(StrEnum):
    """How an attempt ended. Decided at the end of the answer, never at its first byte."""

    COMPLETED = "completed"
    CLIENT_DISCONNECTED = "client_disconnected"
    REJECTED = "rejected"  # the engine refused the request: a 4xx
    OVERLOADED = "overloaded"  # the engine had no room: a 429 or 503 before the first byte
    UPSTREAM_ERROR = "upstream_error"  # a 5xx, or an error event inside a stream
    TRUNCATED = "truncated"  # the connection died after the answer had begun
    TIMED_OUT = "timed_out"  # the engine took longer than the gateway waits, and was told to stop
    SHUTDOWN = "shutdown"  # the gateway was stopped while the answer ran
    UNREACHABLE = "unreachable"  # no answer at all: refused, reset or timed out before the first byte
    CRASHED = "crashed"  # the gateway died while the attempt was open; found at the next start
    FAILED = "failed"  # a defect of the gateway


class AttemptOpened(Record, frozen=True):
    """What is known when an attempt is dispatched. Times are Unix microseconds.

    `purpose` is one of PURPOSES. `client_tokens` estimates the prompt as the client sent it, where
    the gateway sent a compacted one instead; None where it did not. `policy` chose the replica for a job
    of the class `job_class`; `predicted_ttft_us` is the time to the first token that it predicted, and
    `fits` says whether that kept the request's latency budget, None without one.
    """

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
    purpose: str = ANSWER
    client_tokens: int | None = None
    job_class: str | None = None
    predicted_ttft_us: int | None = None
    fits: bool | None = None
    policy: str | None = None


class AttemptSettled(Record, frozen=True):
    """How an attempt ended. Durations are microseconds since `opened_at_us`.

    What it would have cost in nano-dollars: `plain_nano` had the client's own prompts been sent,
    `fixed_nano` had they been compacted at a fixed share of the window; None where that is not known, or
    where the prompt would not have fitted. An answer that goes on after a look-up would have been said at
    once: of that attempt, both are what its words cost more than those before.
    """

    attempt_id: str
    outcome: Outcome
    status: int | None
    finish_reason: str | None
    ttft_us: int | None
    total_us: int
    settled_at_us: int
    usage: Usage
    charge: Charge
    miss: Miss | None = None
    plain_nano: int | None = None
    fixed_nano: int | None = None


@dataclass(frozen=True, slots=True)
class Attempt:
    """One settled row of the ledger."""

    opened: AttemptOpened
    settled: AttemptSettled


@dataclass(frozen=True, slots=True)
class Page:
    """Some settled attempts; `cursor` continues after them and is None at the end."""

    attempts: tuple[Attempt, ...]
    cursor: str | None


@dataclass(frozen=True, slots=True)
class ReportRow:
    """Sums over the settled attempts of one group.

    `requests` counts distinct request ids, `attempts` rows. Token and money sums run over the known
    figures. `unknown_tokens` counts attempts whose uncached, cached or output count is unknown, and
    `unknown_cost` those with an unknown total or component: where it is not 0, `cost_nano` is a lower
    bound. `estimated` counts attempts in which a token count is an estimate.

    `group` is the plain name. A task belongs to the key that used it and a team to its organisation:
    those fields tell groups of one name apart, and are None where the grouping has no such owner.
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
    organisation: str | None = None
    team: str | None = None
    key_id: str | None = None


@dataclass(frozen=True, slots=True)
class MissRow:
    """Sums over the settled attempts that missed the cache for one reason.

    `field` is the place in the request. Behind the first element of an array it stands for all of them:
    `messages[].content`, or, where that is only one, `messages[3].content`. Token and money sums run over
    the known figures; `unknown` counts attempts without.
    """

    cause: MissCause
    detail: str | None
    field: str | None
    requests: int
    attempts: int
    avoidable_tokens: int
    avoidable_nano: int
    unknown: int


@dataclass(frozen=True, slots=True)
class SavingRow:
    """What context management saved in one group, over settled attempts; owners as in `ReportRow`.

    `compacted` counts requests whose client's own prompt was longer by `removed_tokens` in all. Of the
    whole cost, `calls_nano` went to `calls`, the gateway's own. `plain_nano` and `fixed_nano`: see
    `AttemptSettled`; an attempt of which that is not known counts with what it cost.
    """

    group: str
    requests: int
    compacted: int
    removed_tokens: int
    calls: int
    calls_nano: int
    cost_nano: int
    plain_nano: int
    fixed_nano: int
    unknown_cost: int
    organisation: str | None = None
    team: str | None = None
    key_id: str | None = None

    @property
    def saved_nano(self) -> int:
        """Saved less lost: below zero where compaction has cost more than it saved so far."""
        return self.plain_nano - self.cost_nano


class Ledger(Protocol):
    """Where attempts are written. Both steps are idempotent by attempt id.

    A step that fails is logged, and its future's exception counts as retrieved: not every attempt waits.
    """

    @property
    def pending(self) -> int:
        """Openings and settlements that are not durable yet."""
        ...

    @property
    def healthy(self) -> bool:
        """Whether the store takes writes; True again by itself once it does."""
        ...

    @property
    def problem(self) -> str | None:
        """Why the ledger is not healthy, without paths or contents; None while it is."""
        ...

    def open(self, row: AttemptOpened) -> Future[None]:
        """Queue the opening row; the future resolves when it is durable.

        It raises LedgerUnavailable where the store did not take the row, AttemptConflict where the id
        was opened before with other contents, InvalidRow for contents that it cannot hold. Cancelling
        the future does not undo the write.
        """
        ...

    def settle(self, row: AttemptSettled) -> Future[bool]:
        """Queue the settlement; resolves when durable, False if the attempt was already settled.

        May be called before the opening row is durable, and after it was refused: both are then
        written together. A store that fails is tried again until it takes the settlement, so the
        future may be pending for long; past a bound, settlements go to a file first, durable there and
        in reports later. UnknownAttempt where the attempt was never opened.
        """
        ...

    async def report(
        self,
        by: str,
        *,
        where: Mapping[str, str] | None = None,
        since_us: int = 0,
        until_us: int | None = None,
        dearest_first: bool = False,
        limit: int | None = None,
        offset: int = 0,
    ) -> list[ReportRow]:
        """Sums of settled attempts grouped by one of GROUPINGS, sorted by group and owner.

        `dearest_first` sorts by cost, falling, before that. `limit` rows at most, from `offset` on.
        `where` narrows by columns of FILTERS; the span [since_us, until_us) and the day (UTC) are those
        of the attempt's opening, so that an attempt across midnight lies in one day. ValueError for
        an unknown grouping or filter.
        """
        ...

    async def misses(
        self, *, where: Mapping[str, str] | None = None, since_us: int = 0, until_us: int | None = None
    ) -> list[MissRow]:
        """Misses by cause, detail and field, those first that cost most; narrowed like `report`."""
        ...

    async def savings(
        self,
        by: str,
        *,
        where: Mapping[str, str] | None = None,
        since_us: int = 0,
        until_us: int | None = None,
    ) -> list[SavingRow]:
        """What context management saved, grouped and narrowed like `report`, sorted by group and owner."""
        ...

    async def rows(
        self,
        *,
        where: Mapping[str, str] | None = None,
        since_us: int = 0,
        until_us: int | None = None,
        limit: int = 100,
        cursor: str | None = None,
        newest_first: bool = False,
    ) -> Page:
        """Settled attempts in the order of their opening, `limit` at a time from `cursor` on."""
        ...

    async def recover(self) -> Iterable[str]:
        """Settle as crashed what dead gateway processes left open; returns those attempt ids."""
        ...

    async def close(self) -> None:
        """Write everything that is queued, then close. LedgerUnavailable where that failed."""
        ...
