"""Metrics of settled attempts: what is counted, under which bounded labels, and what a scraper reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from ctxgate.gateway.flow import Answered, Held, Settled
from ctxgate.gateway.ledger import Outcome
from ctxgate.gateway.miss import Miss, MissCause
from ctxgate.gateway.telemetry import Telemetry
from ctxgate.inference.rates import Charge
from ctxgate.inference.usage import NOTHING_KNOWN, NOTHING_USED, Usage, estimated, measured
from support.ledgers import RATES_DAY, opened

USAGE = Usage(measured(8), measured(32), measured(5), reasoning=measured(2))
CHARGE = Charge(8_000, 3_200, 10_000, 21_200, exact=True, rates_effective=RATES_DAY)
NO_CHARGE = Charge(None, None, None, None, exact=False, rates_effective=RATES_DAY)


def settled(usage: Usage, charge: Charge, outcome: Outcome = Outcome.COMPLETED, **row: Any) -> Settled:
    """A settled attempt."""
    held = Held(cast("Any", SimpleNamespace()), replace(opened("a"), **row))
    return Settled(Answered(held, outcome, 200, "stop", 100_000, usage), charge)


def samples(telemetry: Telemetry) -> dict[str, float]:
    """The non-zero samples, without the times of their creation."""
    telemetry.tell()
    families = text_string_to_metric_families(telemetry.exposition().decode())
    return {
        f"{s.name}{sorted(s.labels.values())}": s.value
        for family in families
        for s in family.samples
        if s.value and not s.name.endswith(("_created", "_bucket"))
    }


def test_an_attempt_is_counted_by_kind_certainty_and_cost() -> None:
    telemetry = Telemetry()
    telemetry.settled(settled(USAGE, CHARGE), 250_000)
    assert samples(telemetry) == {
        "ctxgate_attempts_total['completed', 'fast', 'search', 'small']": 1,
        "ctxgate_tokens_total['fast', 'measured', 'search', 'small', 'uncached']": 8,
        "ctxgate_tokens_total['cached', 'fast', 'measured', 'search', 'small']": 32,
        "ctxgate_tokens_total['fast', 'measured', 'output', 'search', 'small']": 5,
        "ctxgate_tokens_total['fast', 'measured', 'reasoning', 'search', 'small']": 2,
        "ctxgate_cost_nano_dollars_total['fast', 'search', 'small', 'uncached']": 8_000,
        "ctxgate_cost_nano_dollars_total['cached', 'fast', 'search', 'small']": 3_200,
        "ctxgate_cost_nano_dollars_total['fast', 'output', 'search', 'small']": 10_000,
        "ctxgate_ttft_seconds_sum['fast', 'small']": 0.1,
        "ctxgate_ttft_seconds_count['fast', 'small']": 1,
        "ctxgate_attempt_seconds_sum['fast', 'small']": 0.25,
        "ctxgate_attempt_seconds_count['fast', 'small']": 1,
    }


def test_unknown_is_counted_as_unknown_and_zero_as_nothing() -> None:
    telemetry = Telemetry()
    telemetry.settled(settled(NOTHING_KNOWN, NO_CHARGE, Outcome.FAILED), 1)
    found = samples(telemetry)
    unknown = {name for name in found if name.startswith("ctxgate_unknown_usage_total")}
    assert {kind for kind in ("uncached", "cached", "output") if any(f"'{kind}'" in n for n in unknown)} == {
        "uncached",
        "cached",
        "output",
    }
    assert not any(name.startswith(("ctxgate_tokens", "ctxgate_cost")) for name in found)
    telemetry = Telemetry()
    telemetry.settled(settled(NOTHING_USED, replace(CHARGE, uncached=0, cached=0, output=0, total=0)), 1)
    assert not any("unknown" in name or "tokens" in name or "cost" in name for name in samples(telemetry))


def test_estimates_are_kept_apart() -> None:
    telemetry = Telemetry()
    telemetry.settled(settled(Usage(estimated(40), measured(0), estimated(7)), CHARGE), 1)
    found = samples(telemetry)
    assert found["ctxgate_tokens_total['estimated', 'fast', 'search', 'small', 'uncached']"] == 40
    assert found["ctxgate_tokens_total['estimated', 'fast', 'output', 'search', 'small']"] == 7


def test_gateways_k7_tasks_keys_and_requests_never_become_labels() -> None:
    telemetry = Telemetry()
    for number in range(1000):
        telemetry.settled(
            settled(USAGE, CHARGE, task=f"task-{number}", key_id=f"key-{number}", request_id=f"req-{number}"),
            1,
        )
    telemetry.tell()
    text = telemetry.exposition().decode()
    assert not any(word in text for word in ("task-", "key-", "req-"))
    assert samples(telemetry)["ctxgate_attempts_total['completed', 'fast', 'search', 'small']"] == 1000


@pytest.mark.parametrize(("status", "label"), [(200, "200"), (0, "none")])
def test_requests_are_counted_by_surface_and_status(status: int, label: str) -> None:
    telemetry = Telemetry()
    telemetry.request("chat", status)
    assert samples(telemetry) == {f"ctxgate_requests_total{sorted(('chat', label))}": 1}


def test_a_miss_is_counted_by_pool_and_cause_and_unknown_figures_are_no_zeros() -> None:
    telemetry = Telemetry()
    known = Miss(MissCause.EVICTED, None, avoidable_tokens=70, avoidable_nano=63_000)
    for miss in (known, known, Miss(MissCause.NOT_REPORTED), None):
        telemetry.settled(replace(settled(NOTHING_USED, NO_CHARGE), miss=miss), 0)
    found = {name: value for name, value in samples(telemetry).items() if "miss" in name or "avoid" in name}
    assert found == {
        "ctxgate_cache_misses_total['evicted', 'fast']": 2,
        "ctxgate_avoidable_tokens_total['evicted', 'fast']": 140,
        "ctxgate_avoidable_nano_dollars_total['evicted', 'fast']": 126_000,
        "ctxgate_cache_misses_total['fast', 'not_reported']": 1,
    }
    for labels in ("misses", "avoidable_tokens", "avoidable_cost"):
        assert getattr(telemetry, labels)._labelnames == ("pool", "cause")
