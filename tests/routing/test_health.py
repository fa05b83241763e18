"""The breaker, as a state machine against a model of its rules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxgate.routing.health import COOL_DOWN_US, THRESHOLD, Health, failed, probed, succeeded

NOW = 1_796_040_000_000_000
STEPS = st.lists(
    st.tuples(st.sampled_from(["ok", "fail", "up", "down"]), st.integers(0, 2 * COOL_DOWN_US)), max_size=30
)


@given(STEPS)
def test_it_is_set_aside_exactly_while_the_rules_say_so(steps: list[tuple[str, int]]) -> None:
    health, now = Health(), NOW
    row, opened_at, up = 0, None, True
    for step, pause in steps:
        now += pause
        match step:
            case "ok":
                health, row, opened_at = succeeded(health), 0, None
            case "fail":
                health, row = failed(health, now), row + 1
                if row >= THRESHOLD:
                    opened_at = now
            case _:
                up = step == "up"
                health = probed(health, up)
        cooling = opened_at is not None and now < opened_at + COOL_DOWN_US
        assert health.healthy(now) is (up and not cooling)
        assert health.failures == row


def test_gateways_j4_three_failures_in_a_row_open_it_and_a_fourth_after_the_pause_opens_it_again() -> None:
    health = Health()
    for count in range(THRESHOLD):
        assert health.healthy(NOW)
        health = failed(health, NOW)
        assert health.failures == count + 1
    assert not health.healthy(NOW + COOL_DOWN_US - 1)
    later = NOW + COOL_DOWN_US
    assert health.healthy(later)  # half open: attempts may try
    assert not failed(health, later).healthy(later)
    assert succeeded(health).healthy(NOW)


def test_a_probe_neither_closes_nor_resets_the_breaker() -> None:
    health = Health()
    for _ in range(THRESHOLD):
        health = failed(health, NOW)
    assert not probed(probed(health, ok=False), ok=True).healthy(NOW)
    assert probed(health, ok=True).failures == THRESHOLD


@pytest.mark.parametrize("health", [Health(), Health(probe_ok=False)])
def test_what_changes_nothing_is_the_same_object(health: Health) -> None:
    assert succeeded(health) is health
    assert probed(health, health.probe_ok) is health
