"""Rendezvous hashing: stable, even, and moving no conversation but those of a lost replica."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxgate.routing.choose import rendezvous, rendezvous_score
from ctxgate.routing.snapshot import ReplicaState

ROOTS = st.binary(min_size=1, max_size=64)
NAMES = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=6, unique=True)


def fleet(*names: str, unhealthy: tuple[str, ...] = ()) -> list[ReplicaState]:
    """Replicas of one pool."""
    return [ReplicaState("p", name, name not in unhealthy, 0) for name in names]


@given(ROOTS, NAMES, st.data())
def test_losing_a_replica_moves_only_its_own_conversations(
    root: bytes, names: list[str], data: st.DataObject
) -> None:
    before = rendezvous(root, fleet(*names))
    lost = data.draw(st.sampled_from(names))
    after = rendezvous(root, fleet(*(name for name in names if name != lost)))
    assert before is not None
    if before.replica != lost:
        assert after is not None
        assert after.replica == before.replica
    elif len(names) > 1:
        assert after is not None
        assert after.replica == before.candidates[1].replica


@given(ROOTS, NAMES, st.data())
def test_the_order_of_the_snapshot_and_the_load_do_not_matter(
    root: bytes, names: list[str], data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(names))
    loaded = [ReplicaState("p", name, True, data.draw(st.integers(0, 99))) for name in shuffled]
    one, other = rendezvous(root, fleet(*names)), rendezvous(root, loaded)
    assert one is not None
    assert other is not None
    assert one.replica == other.replica


@given(ROOTS, NAMES, st.data())
def test_every_replica_is_tried_once_and_healthy_ones_first(
    root: bytes, names: list[str], data: st.DataObject
) -> None:
    unhealthy = tuple(data.draw(st.lists(st.sampled_from(names), unique=True)))
    snapshot = fleet(*names, unhealthy=unhealthy)
    tried: list[str] = []
    while (decision := rendezvous(root, snapshot, tried)) is not None:
        assert len(decision.candidates) == len(names)
        tried.append(decision.replica)
    assert sorted(tried) == sorted(names)
    healthy = [name for name in tried if name not in unhealthy]
    assert tried[: len(healthy)] == healthy
    for part in (healthy, tried[len(healthy) :]):
        scores = [rendezvous_score(root, "p", name) for name in part]
        assert scores == sorted(scores, reverse=True)


def test_routing_e4_the_conversations_of_a_lost_replica_spread_over_the_others() -> None:
    names = ("a", "b", "c", "d")
    roots = [number.to_bytes(4, "big") for number in range(4000)]
    owners = {root: _chosen(root, fleet(*names)) for root in roots}
    share = Counter(owners.values())
    assert all(900 < share[name] < 1100 for name in names)  # five standard deviations are 137
    orphans = [root for root in roots if owners[root] == "a"]
    heirs = Counter(_chosen(root, fleet(*names, unhealthy=("a",))) for root in orphans)
    assert set(heirs) == {"b", "c", "d"}
    assert all(count > len(orphans) / 4 for count in heirs.values())


def _chosen(root: bytes, snapshot: list[ReplicaState]) -> str:
    decision = rendezvous(root, snapshot)
    assert decision is not None
    return decision.replica


@pytest.mark.integration
def test_the_score_is_the_same_in_every_process() -> None:
    expected = rendezvous_score(b"root", "pool", "replica")
    assert 0 <= expected < 1
    code = (
        "from ctxgate.routing.choose import rendezvous_score as s; print(repr(s(b'root', 'pool', 'replica')))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert found == {repr(expected)}


def test_pool_and_replica_are_kept_apart_in_the_score() -> None:
    assert rendezvous_score(b"r", "ab", "c") != rendezvous_score(b"r", "a", "bc")


@pytest.mark.parametrize("snapshot", [[], fleet("a")])
def test_nothing_left_is_no_decision(snapshot: list[ReplicaState]) -> None:
    assert rendezvous(b"r", snapshot, ["a"]) is None


def test_the_reasons_of_the_losers_are_told() -> None:
    decision = rendezvous(b"r", fleet("a", "b", "c", unhealthy=("b",)), ["c"])
    assert decision is not None
    assert (decision.replica, decision.policy, decision.pool) == ("a", "rendezvous", "p")
    assert [(one.replica, one.excluded) for one in decision.candidates] == [
        ("a", None),
        ("b", "unhealthy"),
        ("c", "tried"),
    ]
