"""What the process knows of its replicas: open attempts given back on every way out, health by outcome."""

from __future__ import annotations

import pytest

from ctxgate.gateway.config import Pool, Replica
from ctxgate.gateway.fleet import Fleet
from ctxgate.gateway.ledger import Outcome
from ctxgate.inference.rates import RateCard
from ctxgate.routing.health import THRESHOLD
from support.gateway import RATES

NOW = 1_796_040_000_000_000
CARD = RateCard(((RATES,),))


@pytest.fixture
def fleet() -> Fleet:
    """Two pools with a replica name in common."""
    return Fleet(
        {
            "fast": Pool("fast", (Replica("one", "http://a"), Replica("two", "http://b")), CARD),
            "slow": Pool("slow", (Replica("one", "http://c"),), CARD),
        }
    )


def test_a_count_is_given_back_also_when_the_block_fails(fleet: Fleet) -> None:
    def interrupted() -> None:
        with fleet.taken("fast", "one"), fleet.taken("fast", "one"):
            assert fleet.record("fast", "one").in_flight == 2
            assert fleet.record("slow", "one").in_flight == 0
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert all(record.in_flight == 0 for record in fleet.records())


@pytest.mark.parametrize(
    ("outcome", "effect"),
    [
        (Outcome.COMPLETED, "success"),
        (Outcome.REJECTED, "success"),
        (Outcome.UPSTREAM_ERROR, "failure"),
        (Outcome.TRUNCATED, "failure"),
        (Outcome.UNREACHABLE, "failure"),
        (Outcome.OVERLOADED, "none"),
        (Outcome.CLIENT_DISCONNECTED, "none"),
        (Outcome.FAILED, "none"),
        (Outcome.CRASHED, "none"),
    ],
)
def test_what_each_outcome_says_of_a_replica(fleet: Fleet, outcome: Outcome, effect: str) -> None:
    record = fleet.record("fast", "one")
    fleet.ended("fast", "one", Outcome.TRUNCATED, NOW)
    fleet.ended("fast", "one", outcome, NOW)
    assert record.health.failures == {"success": 0, "failure": 2, "none": 1}[effect]
    assert fleet.record("slow", "one").health.failures == 0


def test_routing_a4_probes_do_not_touch_the_load(fleet: Fleet) -> None:
    with fleet.taken("fast", "one"):
        for _ in range(20):
            fleet.probed("fast", "one", ok=True, windows={"m": 10})
            fleet.probed("fast", "one", ok=False, windows={})
        assert fleet.record("fast", "one").in_flight == 1


def test_the_snapshot_is_what_the_router_decides_on(fleet: Fleet) -> None:
    pools = [record.pool for record in fleet.records()]
    for _ in range(THRESHOLD):
        fleet.ended("fast", "two", Outcome.UNREACHABLE, NOW)
    fleet.probed("slow", "one", ok=False, windows={})
    with fleet.taken("fast", "one"):
        snapshot = fleet.snapshot((pools[0], pools[2]), NOW)
    assert [(s.pool, s.name, s.healthy, s.in_flight) for s in snapshot] == [
        ("fast", "one", True, 1),
        ("fast", "two", False, 0),
        ("slow", "one", False, 0),
    ]


def test_the_window_is_the_largest_reported_and_survives_a_failed_probe(fleet: Fleet) -> None:
    pools = [record.pool for record in fleet.records()]
    assert fleet.window(pools, "m") is None
    fleet.probed("fast", "one", ok=True, windows={"m": 4096, "other": 1})
    fleet.probed("fast", "two", ok=True, windows={"m": None})
    fleet.probed("slow", "one", ok=True, windows={"m": 8192})
    assert fleet.window(pools, "m") == 8192
    assert fleet.window(pools[:1], "m") == 4096
    fleet.probed("slow", "one", ok=False, windows={})
    assert fleet.window(pools, "m") == 8192
