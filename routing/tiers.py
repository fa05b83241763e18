"""How long a request may take, and which profile of pools it prefers: from what it asks, else by its class.

    x-ctxgate-class ──> class of the job ──> the team's bounds and preference for it, else DEFAULTS
    service_tier ─────> priority: fast, flex: standard; default and auto leave it to the class
    x-ctxgate-ttft-ms, x-ctxgate-latency-ms ──> bounds of this one request

A bound steers where a request goes and how long it is tried again. It never refuses one. Which pools may
serve is for the model's own list of pools to say: no header and no tier reaches past it.
"""

from __future__ import annotations

from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from ctxgate.inference.record import Record
from ctxgate.routing.snapshot import LatencyBudget

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ctxgate.routing.snapshot import Profile

CLASS_HEADER: Final = "x-ctxgate-class"
TTFT_HEADER: Final = "x-ctxgate-ttft-ms"
LATENCY_HEADER: Final = "x-ctxgate-latency-ms"
MOST_MS: Final = 86_400_000
"""A day: no answer is waited for any longer."""


class JobClass(StrEnum):
    """What kind of job a request is part of."""

    INTERACTIVE = "interactive"  # somebody waits for the first words
    AGENT = "agent"  # a loop of tool calls, each waiting for the one before
    BATCH = "batch"  # nobody waits
    REASONING = "reasoning"  # long answers that are worth waiting for


class ServiceTier(StrEnum):
    """OpenAI's service tiers that have a meaning here. Any other goes to the engine as it came."""

    AUTO = "auto"
    DEFAULT = "default"
    FLEX = "flex"
    PRIORITY = "priority"


DEFAULTS: Final[Mapping[JobClass, LatencyBudget]] = MappingProxyType(
    {
        JobClass.INTERACTIVE: LatencyBudget(prefer="fast", source="class"),
        JobClass.AGENT: LatencyBudget(prefer="fast", source="class"),
        JobClass.BATCH: LatencyBudget(prefer="standard", source="class"),
        JobClass.REASONING: LatencyBudget(prefer="standard", source="class"),
    }
)
"""By class of job, where a team says nothing."""

_PREFERRED: Final[Mapping[str, Profile]] = {ServiceTier.PRIORITY: "fast", ServiceTier.FLEX: "standard"}


class BadTier(ValueError):
    """A header that cannot be understood; `header` names it, and the message says what it must be."""

    def __init__(self, header: str, must: str) -> None:
        super().__init__(f"Header '{header}' must be {must}.")
        self.header = header


class Classes(Record, frozen=True):
    """A team's classes: the one of requests that name none, and the budget of each."""

    default: JobClass = JobClass.AGENT
    budgets: Mapping[JobClass, LatencyBudget] = DEFAULTS


TEAMLESS: Final = Classes()


def asked(
    headers: Mapping[str, str], service_tier: object, classes: Classes
) -> tuple[JobClass, LatencyBudget]:
    """The class of a request and its budget, counted from its arrival.

    `headers` in lower case, `service_tier` the decoded field of the body, None without one. A header's bound
    takes the place of the class's bound of the same kind, shorter or longer. Raises `BadTier`.
    """
    job = _class(headers.get(CLASS_HEADER), classes.default)
    budget = classes.budgets[job]
    prefer = _PREFERRED.get(service_tier) if isinstance(service_tier, str) else None
    ttft, total = headers.get(TTFT_HEADER), headers.get(LATENCY_HEADER)
    if prefer is ttft is total is None:
        return job, budget
    source = "service_tier" if ttft is total is None else "header"
    return job, LatencyBudget(
        budget.ttft_us if ttft is None else _bound_us(TTFT_HEADER, ttft),
        budget.total_us if total is None else _bound_us(LATENCY_HEADER, total),
        prefer or budget.prefer,
        source,
    )


def tier_used(profile: Profile | None, service_tier: object) -> str:
    """The `service_tier` that an answer reports: the one it was really served with.

    A client that asked for `priority` and was served by a standard pool is told `default`, as OpenAI does.
    """
    if profile == "fast":
        return ServiceTier.PRIORITY.value
    flex = profile == "standard" and service_tier == ServiceTier.FLEX
    return ServiceTier.FLEX.value if flex else ServiceTier.DEFAULT.value


def _class(value: str | None, default: JobClass) -> JobClass:
    if value is None:
        return default
    try:
        return JobClass(value.strip())
    except ValueError:
        raise BadTier(CLASS_HEADER, f"one of: {', '.join(JobClass)}") from None


def _bound_us(header: str, value: str) -> int:
    text = value.strip()
    if not (text.isascii() and text.isdecimal() and len(text) <= 9 and 0 < int(text) <= MOST_MS):
        raise BadTier(header, f"a whole number of milliseconds from 1 to {MOST_MS}")
    return int(text) * 1000
