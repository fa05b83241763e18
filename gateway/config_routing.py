"""The fields of routing: a team's classes of jobs, a model's policy, a pool's load; see `config_fields`."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from ctxgate.gateway.config_kinds import choice, whole
from ctxgate.gateway.config_schema import Field, Section, Short
from ctxgate.routing.policies import CTXGATE, POLICIES
from ctxgate.routing.snapshot import LatencyBudget
from ctxgate.routing.tiers import DEFAULTS, MOST_MS, Classes, JobClass

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ctxgate.gateway.config_schema import Values
    from ctxgate.routing.snapshot import Profile

LOAD_SOURCES: Final = ("metrics", "header", "off")
LOAD: Final = Field(
    "load",
    choice(*LOAD_SOURCES),
    "Where the replicas tell their load of all clients. `metrics`: their `/metrics`, read at each health "
    "probe, every two seconds. `header`: on each answer, by the header `endpoint-load-metrics`; vLLM has "
    "none on a stream. `off`: only what this gateway sent there counts, and so it does where nothing was "
    "told for ten seconds.",
    "metrics",
)

POLICY: Final = Field(
    "policy",
    choice(*POLICIES),
    "How a replica is chosen. `ctxgate`: the cheapest one that meets the latency budget as predicted, where "
    "the prompt's prefix is warm. The others are there to compare with: they look at neither prices nor "
    "budgets.",
    CTXGATE,
)
MODEL_ROUTING_SECTION: Final = Section((POLICY,))
MODEL_ROUTING: Final = Field(
    "routing",
    Short(MODEL_ROUTING_SECTION, POLICY),
    "How requests are spread over the replicas of all its pools.",
    default_text=f"`{CTXGATE}`",
)

_PREFER: Final[Mapping[str, Profile]] = {"fast": "fast", "standard": "standard"}
TTFT_MS: Final = Field(
    "ttft_ms",
    whole(1, MOST_MS),
    "Milliseconds from a request's arrival to the first token. A request may ask for another bound with "
    "`x-ctxgate-ttft-ms`.",
    default_text="no bound",
)
LATENCY_MS: Final = Field(
    "latency_ms",
    whole(1, MOST_MS),
    "Milliseconds from a request's arrival to the end of its answer. A request may ask for another bound "
    "with `x-ctxgate-latency-ms`. Once it has passed, a failed attempt is not tried again.",
    default_text="no bound",
)
PREFER: Final = Field(
    "prefer",
    choice(*_PREFER),
    "The profile of pools that is taken where several meet the bounds at about the same price. A request may "
    "ask for one with `service_tier`: `priority` is `fast`, `flex` is `standard`.",
    default_text="`fast` for `interactive` and `agent`, `standard` for `batch` and `reasoning`",
)
CLASS_SECTION: Final = Section((TTFT_MS, LATENCY_MS, PREFER))
DEFAULT_CLASS: Final = Field(
    "default",
    choice(*JobClass),
    "The class of requests without the header `x-ctxgate-class`.",
    JobClass.AGENT.value,
)
_ABOUT: Final = {
    JobClass.INTERACTIVE: "Somebody waits for the first words.",
    JobClass.AGENT: "A loop of tool calls.",
    JobClass.BATCH: "Nobody waits.",
    JobClass.REASONING: "Long answers that are worth waiting for.",
}
CLASS_FIELDS: Final = {
    job: Field(job.value, CLASS_SECTION, about, default_text="no bounds") for job, about in _ABOUT.items()
}
CLASSES_SECTION: Final = Section((DEFAULT_CLASS, *CLASS_FIELDS.values()))
CLASSES: Final = Field(
    "classes",
    Short(CLASSES_SECTION, DEFAULT_CLASS),
    "How long the team's requests may take, by the class of their job, which a request names with "
    "`x-ctxgate-class`. A bound decides where a request goes; it never refuses one. Which pools may serve is "
    "the model's list alone.",
    default_text="`agent`, without bounds",
)


def classes_of(values: Values | None) -> Classes:
    """A team's classes."""
    if values is None:
        return Classes()
    budgets = {job: _budget(values.get(one), DEFAULTS[job]) for job, one in CLASS_FIELDS.items()}
    return Classes(JobClass(values[DEFAULT_CLASS]), MappingProxyType(budgets))


def policy_of(values: Values | None) -> str:
    """A model's routing policy."""
    return CTXGATE if values is None else values[POLICY]


def _budget(values: Values | None, usual: LatencyBudget) -> LatencyBudget:
    if values is None:
        return usual
    ttft, total, prefer = values.get(TTFT_MS), values.get(LATENCY_MS), values.get(PREFER)
    return LatencyBudget(
        None if ttft is None else ttft * 1000,
        None if total is None else total * 1000,
        usual.prefer if prefer is None else _PREFER[prefer],
        "class",
    )
