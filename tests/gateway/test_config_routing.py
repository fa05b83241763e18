"""What a configuration says of routing: classes of jobs, policies, where a load is told."""

from __future__ import annotations

import pytest

from config_texts import VALID, edited, read_text, shown
from ctxgate.routing.policies import POLICIES
from ctxgate.routing.snapshot import LatencyBudget
from ctxgate.routing.tiers import DEFAULTS, Classes, JobClass


def classes(written: str) -> str:
    return edited("{organisation: acme}", f"{{organisation: acme, classes: {written}}}")


def read(written: str) -> Classes:
    return read_text(classes(written)).config.teams["research"].classes


def test_without_classes_agents_are_meant_and_nothing_is_bounded() -> None:
    found = read_text(VALID).config.teams["research"].classes
    assert found == Classes() == read("{}")
    assert found.default is JobClass.AGENT
    assert {job: (one.ttft_us, one.total_us, one.prefer) for job, one in found.budgets.items()} == {
        "interactive": (None, None, "fast"),
        "agent": (None, None, "fast"),
        "batch": (None, None, "standard"),
        "reasoning": (None, None, "standard"),
    }


def test_the_default_class_may_stand_alone() -> None:
    assert read("batch") == read("{default: batch}") == Classes(JobClass.BATCH)


def test_a_class_is_bounded_in_milliseconds_and_prefers_what_it_says() -> None:
    found = read(
        "{default: interactive, interactive: {ttft_ms: 800, latency_ms: 20000}, batch: {prefer: fast}}"
    )
    assert found.default is JobClass.INTERACTIVE
    assert found.budgets == {
        **DEFAULTS,
        JobClass.INTERACTIVE: LatencyBudget(800_000, 20_000_000, "fast", "class"),
        JobClass.BATCH: LatencyBudget(None, None, "fast", "class"),
    }


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("{default: fsat}", "classes.default: must be"),
        ("{agents: {}}", "classes.agents: is not a known field"),
        ("{agent: {ttft_ms: 0}}", "classes.agent.ttft_ms: must be a whole number from 1"),
        ("{agent: {latency_ms: 86400001}}", "classes.agent.latency_ms: must be a whole number from 1"),
        ("{agent: {prefer: cheap}}", 'classes.agent.prefer: must be "fast" or "standard"'),
        ("{agent: {ttft: 5}}", "classes.agent.ttft: is not a known field"),
    ],
)
def test_a_wrong_class_is_refused_with_its_place(written: str, problem: str) -> None:
    assert any(f"teams.research.{problem}" in each for each in shown(classes(written)))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_model_may_have_any_policy_alone_or_in_a_section(policy: str) -> None:
    for written in (policy, f"{{policy: {policy}}}"):
        text = edited("tiny: {pools: [standard]", f"tiny: {{pools: [standard], routing: {written}")
        assert read_text(text).config.models["tiny"].routing == policy
    assert read_text(VALID).config.models["tiny"].routing == "ctxgate"


def test_an_unknown_policy_is_refused() -> None:
    text = edited("tiny: {pools: [standard]", "tiny: {pools: [standard], routing: fastest")
    (only,) = shown(text)
    assert "models.tiny.routing: must be one of ctxgate, " in only


@pytest.mark.parametrize("source", ["metrics", "header", "off"])
def test_a_pool_says_where_its_load_is_told(source: str) -> None:
    text = edited("  fast:\n", f"  fast:\n    load: {source}\n")
    assert read_text(text).config.pools["fast"].load == source
    assert read_text(VALID).config.pools["fast"].load == "metrics"
