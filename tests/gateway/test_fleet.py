"""What the process knows of its replicas: open attempts given back on every way out, health, windows."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest

from ctxgate.compression.rules import ALL_RULES, Rule
from ctxgate.gateway.config import Pool, Replica
from ctxgate.gateway.fleet import Fleet
from ctxgate.inference.engine_load import EngineLoad
from ctxgate.inference.finding import Finding
from ctxgate.inference.probe import Probe
from ctxgate.inference.rates import RateCard
from ctxgate.inference.template_facts import CacheReport, Findings, TemplateFacts, Verdict
from ctxgate.routing.health import COOL_DOWN_US, THRESHOLD, Health, Sign
from ctxgate.routing.snapshot import Work
from support.gateway import RATES

CARD = RateCard(((RATES,),))


@dataclass(slots=True)
class Clock:
    """Stands still unless the test moves it."""

    us: int = 1_796_040_000_000_000

    def __call__(self) -> int:
        return self.us


@pytest.fixture
def clock() -> Clock:
    """The fleet's clock."""
    return Clock()


@pytest.fixture
def pools() -> dict[str, Pool]:
    """Two pools with a replica name in common."""
    return {
        "fast": Pool("fast", (Replica("one", "http://a"), Replica("two", "http://b")), CARD),
        "slow": Pool("slow", (Replica("one", "http://c"),), CARD),
    }


@pytest.fixture
def fleet(pools: dict[str, Pool], clock: Clock) -> Fleet:
    """The fleet of these pools."""
    return Fleet(pools, clock)


def test_a_count_is_given_back_also_when_the_block_fails(fleet: Fleet) -> None:
    def interrupted() -> None:
        with fleet.taken("fast", "one"), fleet.taken("fast", "one"):
            assert fleet.record("fast", "one").in_flight == 2
            assert fleet.record("slow", "one").in_flight == 0
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert all(record.in_flight == 0 for record in fleet.records())


def test_what_a_replica_has_to_do_is_told_as_it_is_after_every_step(fleet: Fleet) -> None:
    def work() -> Work:
        (state, _) = fleet.snapshot((fleet.record("fast", "one").pool,))
        return state.work

    assert work() == Work()
    with fleet.taken("fast", "one", new=300, length=1_000) as taken:
        assert work() == Work(300, prefill_pairs=300 * (1_000 - 150))
        fleet.told_load("fast", "one", EngineLoad(running=4, waiting=2, kv_usage=0.5))
        assert work() == Work(300, 0, 0, 300 * (1_000 - 150), 4, 2, 0.5)
        taken.first_token()
        assert work() == Work(0, 1, 1_000, 0, 4, 2, 0.5)
    assert work() == Work(0, 0, 0, 0, 4, 2, 0.5)
    fleet.probed("fast", "one", Probe(Finding.REFUSED))
    assert work() == Work()  # another engine may answer there


def test_replicas_of_pools_that_a_reload_replaced_are_those_that_are_still_there(
    fleet: Fleet, pools: dict[str, Pool]
) -> None:
    def names(pool: Pool) -> list[str]:
        return [state.name for state in fleet.snapshot((pool,))]

    before = pools["fast"]
    after = Pool("fast", (Replica("two", "http://b"), Replica("three", "http://d")), CARD)
    assert names(before) == ["one", "two"]
    fleet.update({"fast": after})
    for _ in range(2):  # requests of both configurations take turns
        assert names(before) == ["two"]
        assert names(after) == ["two", "three"]
    assert names(pools["slow"]) == []


def test_the_end_of_an_attempt_counts_at_its_own_replica_only(fleet: Fleet) -> None:
    fleet.ended("fast", "one", Sign.LOST, b"a")
    fleet.ended("fast", "one", Sign.FAULT, b"b")
    assert fleet.record("fast", "one").health.failures == 2
    assert fleet.record("fast", "two").health == fleet.record("slow", "one").health == Health()
    fleet.ended("fast", "one", Sign.WELL, b"c")
    assert fleet.record("fast", "one").health == Health()


def test_half_open_one_attempt_at_a_time_and_its_every_end_lets_the_next_one_try(
    fleet: Fleet, clock: Clock
) -> None:
    record = fleet.record("fast", "one")
    with fleet.taken("fast", "one"):  # began before the breaker opened: no trial
        for _ in range(THRESHOLD):
            fleet.ended("fast", "one", Sign.REFUSED, b"a")
        assert not fleet.healthy(record)
        clock.us += COOL_DOWN_US
        assert fleet.healthy(record)
        with fleet.taken("fast", "one"):
            assert not fleet.healthy(record)
            with fleet.taken("fast", "one"):  # sent there all the same
                pass
            assert not fleet.healthy(record)
        assert fleet.healthy(record)
    assert fleet.healthy(record)


def test_the_breaker_goes_by_a_clock_that_never_steps_back(
    pools: dict[str, Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(pools)
    for _ in range(THRESHOLD):
        fleet.ended("fast", "one", Sign.REFUSED, b"a")
    record = fleet.record("fast", "one")
    monkeypatch.setattr(time, "time_ns", lambda: 0)  # the time of day steps back by decades
    elapsed = time.monotonic_ns() + COOL_DOWN_US * 1000
    assert not fleet.healthy(record)
    monkeypatch.setattr(time, "monotonic_ns", lambda: elapsed)
    assert fleet.healthy(record)


def test_routing_a4_probes_do_not_touch_the_load(fleet: Fleet) -> None:
    with fleet.taken("fast", "one"):
        for _ in range(20):
            fleet.probed("fast", "one", Probe(Finding.WELL, {"m": 10}))
            fleet.probed("fast", "one", Probe(Finding.REFUSED))
        assert fleet.record("fast", "one").in_flight == 1


def test_the_snapshot_is_what_the_router_decides_on(fleet: Fleet) -> None:
    pools = [record.pool for record in fleet.records()]
    for _ in range(THRESHOLD):
        fleet.ended("fast", "two", Sign.REFUSED, b"a")
    fleet.probed("slow", "one", Probe(Finding.UNWELL))
    with fleet.taken("fast", "one"):
        snapshot = fleet.snapshot((pools[0], pools[2]))
    assert [(s.pool, s.name, s.healthy, s.in_flight) for s in snapshot] == [
        ("fast", "one", True, 1),
        ("fast", "two", False, 0),
        ("slow", "one", False, 0),
    ]


def test_the_window_is_the_largest_reported_and_survives_a_failed_probe(fleet: Fleet) -> None:
    pools = [record.pool for record in fleet.records()]
    assert fleet.window(pools, "m") is None
    fleet.probed("fast", "one", Probe(Finding.WELL, {"m": 4096, "other": 1}))
    fleet.probed("fast", "two", Probe(Finding.WELL, {"m": None}))
    fleet.probed("slow", "one", Probe(Finding.WELL, {"m": 8192}))
    assert fleet.window(pools, "m") == 8192
    assert fleet.window(pools[:1], "m") == 4096
    fleet.probed("slow", "one", Probe(Finding.UNWELL))
    fleet.probed("slow", "one", Probe(Finding.WELL))  # its models were not told
    assert fleet.window(pools, "m") == 8192
    fleet.probed("slow", "one", Probe(Finding.WELL, {"m": 2048}))
    assert fleet.window(pools, "m") == 4096


def test_a_rule_is_on_where_every_known_template_of_the_pool_allows_it(fleet: Fleet) -> None:
    one, two, slow = fleet.records()
    assert fleet.rules("fast", "m") == ALL_RULES
    fleet.examined(one, "m", Findings(facts=TemplateFacts(tool_order=Verdict.DIFFERENT)))
    assert fleet.rules("fast", "m") == ALL_RULES - {Rule.TOOLS}
    fleet.examined(two, "m", Findings(facts=TemplateFacts(arguments=Verdict.DIFFERENT)))
    assert fleet.rules("fast", "m") == {Rule.EMPTY_CONTENT, Rule.CALL_IDS}
    assert fleet.rules("fast", "other") == fleet.rules("slow", "m") == ALL_RULES
    fleet.examined(one, "m", Findings())
    assert fleet.rules("fast", "m") == ALL_RULES - {Rule.ARGUMENTS}
    assert slow.findings == {}


def test_gateways_b7_a_report_is_learned_and_an_unknown_one_changes_nothing(fleet: Fleet) -> None:
    record = fleet.record("fast", "one")
    assert record.reports_cached is None
    for reports, known in ((False, False), (None, False), (True, True), (None, True)):
        fleet.examined(record, "m", Findings(CacheReport(reports)))
        assert record.reports_cached is known


def test_the_fleet_is_settled_once_no_probe_is_worth_waiting_for(fleet: Fleet, clock: Clock) -> None:
    assert fleet.settled()
    fleet.record("fast", "two").settling_until_us = clock.us + 1
    assert not fleet.settled()
    clock.us += 1
    assert fleet.settled()
