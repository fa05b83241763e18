"""What holds for every routing policy, whatever the fleet is like."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxgate.routing.choose import choose
from ctxgate.routing.policies import POLICIES
from ctxgate.routing.snapshot import Demand, LatencyBudget, ReplicaState

DEMAND = Demand(b"root", "request", 2_000, 200, LatencyBudget(ttft_us=1_000_000))
STATES = st.lists(
    st.tuples(st.booleans(), st.booleans(), st.booleans(), st.integers(0, 4000), st.integers(0, 90)),
    min_size=1,
    max_size=7,
)


@pytest.mark.parametrize("policy", POLICIES)
@given(states=STATES, turn=st.integers(0, 99))
def test_no_policy_takes_one_that_was_tried_or_drains_and_an_unhealthy_one_only_alone(
    policy: str, states: list[tuple[bool, bool, bool, int, int]], turn: int
) -> None:
    fleet = [
        ReplicaState("fast" if at % 2 else "standard", f"r{at}", healthy, load, drains, hit_tokens=hit)
        for at, (healthy, drains, _, hit, load) in enumerate(states)
    ]
    tried = [f"r{at}" for at, state in enumerate(states) if state[2]]
    left = [state for state in fleet if not state.draining and state.name not in tried]
    decision = choose(DEMAND, fleet, {}, tried, policy, turn=turn)
    assert (decision is None) == (not left)
    if decision is not None:
        winner = next(state for state in left if state.name == decision.replica)
        assert winner.healthy or not any(state.healthy for state in left)
        assert sorted(one.replica for one in decision.candidates) == [state.name for state in fleet]
        assert decision.policy == policy
