"""Latency budgets from headers, service tiers and classes of jobs."""

from __future__ import annotations

import pytest

from ctxgate.routing.snapshot import LatencyBudget
from ctxgate.routing.tiers import (
    CLASS_HEADER,
    DEFAULTS,
    LATENCY_HEADER,
    TTFT_HEADER,
    BadTier,
    Classes,
    JobClass,
    asked,
    tier_used,
)

CLASSES = Classes(
    JobClass.INTERACTIVE,
    {**DEFAULTS, JobClass.INTERACTIVE: LatencyBudget(500_000, 9_000_000, "fast", "class")},
)


@pytest.mark.parametrize(
    ("job", "prefer"),
    [("interactive", "fast"), ("agent", "fast"), ("batch", "standard"), ("reasoning", "standard")],
)
def test_a_class_says_what_is_preferred_and_bounds_nothing_by_itself(job: str, prefer: str) -> None:
    found, budget = asked({CLASS_HEADER: job}, None, Classes())
    assert (found, budget.prefer, budget.ttft_us, budget.total_us) == (job, prefer, None, None)


def test_without_a_header_the_teams_default_class_counts() -> None:
    assert asked({}, None, Classes())[0] is JobClass.AGENT
    assert asked({}, None, CLASSES) == (
        JobClass.INTERACTIVE,
        LatencyBudget(500_000, 9_000_000, "fast", "class"),
    )


def test_a_header_replaces_the_bound_of_its_kind_alone() -> None:
    _, budget = asked({TTFT_HEADER: "250"}, None, CLASSES)
    assert budget == LatencyBudget(250_000, 9_000_000, "fast", "header")
    _, budget = asked({LATENCY_HEADER: " 60000 "}, None, CLASSES)
    assert budget == LatencyBudget(500_000, 60_000_000, "fast", "header")


@pytest.mark.parametrize(
    ("tier", "prefer", "source"),
    [
        ("priority", "fast", "service_tier"),
        ("flex", "standard", "service_tier"),
        ("default", "standard", "class"),
        ("auto", "standard", "class"),
        ("scale", "standard", "class"),
        (None, "standard", "class"),
        (7, "standard", "class"),
    ],
)
def test_a_service_tier_outranks_the_class(tier: object, prefer: str, source: str) -> None:
    _, budget = asked({CLASS_HEADER: "batch"}, tier, Classes())
    assert (budget.prefer, budget.source) == (prefer, source)


def test_a_tier_keeps_the_bounds_of_the_class() -> None:
    _, budget = asked({}, "flex", CLASSES)
    assert budget == LatencyBudget(500_000, 9_000_000, "standard", "service_tier")


@pytest.mark.parametrize("header", [TTFT_HEADER, LATENCY_HEADER])
@pytest.mark.parametrize(
    "value", ["", "0", "-5", "1.5", "fast", "+7", "1e3", "86400001", "9" * 400, "\u0663", "1_0"]
)
def test_a_bound_that_is_none_is_refused_with_its_header(header: str, value: str) -> None:
    with pytest.raises(BadTier, match=header) as caught:
        asked({header: value}, None, Classes())
    assert caught.value.header == header
    assert value == "" or len(value) < 3 or value not in str(caught.value)


def test_routing_f3_an_unknown_class_is_refused_with_its_header_and_what_is_known() -> None:
    with pytest.raises(BadTier, match="interactive, agent, batch, reasoning") as caught:
        asked({CLASS_HEADER: "fsat"}, None, Classes())
    assert caught.value.header == CLASS_HEADER


@pytest.mark.parametrize(
    ("profile", "asked_for", "told"),
    [
        ("fast", "priority", "priority"),
        ("fast", "flex", "priority"),
        ("fast", "auto", "priority"),
        ("standard", "flex", "flex"),
        ("standard", "priority", "default"),
        ("standard", "auto", "default"),
        (None, "flex", "default"),
    ],
)
def test_the_tier_told_is_the_one_that_was_used(profile: str | None, asked_for: str, told: str) -> None:
    assert tier_used(profile, asked_for) == told  # type: ignore[arg-type] # a profile by its word


def test_a_budget_runs_out_and_never_below_nothing() -> None:
    budget = LatencyBudget(500_000, 9_000_000, "fast", "class")
    assert budget.left(200_000) == LatencyBudget(300_000, 8_800_000, "fast", "class")
    assert budget.left(1_000_000) == LatencyBudget(0, 8_000_000, "fast", "class")
    assert budget.left(10_000_000) == LatencyBudget(0, 0, "fast", "class")
    assert LatencyBudget(prefer="fast").left(10**12) == LatencyBudget(prefer="fast")


@pytest.mark.parametrize(
    ("ttft_us", "total_us", "kept"),
    [(500, 9_000, True), (501, 9_000, False), (500, 9_001, False), (None, 500, True), (None, 501, False)],
)
def test_a_budget_is_kept_by_what_the_client_saw(ttft_us: int | None, total_us: int, kept: bool) -> None:
    assert LatencyBudget(500, 9_000).kept(ttft_us, total_us) is kept
    assert LatencyBudget().kept(ttft_us, total_us)
