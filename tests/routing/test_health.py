"""The breaker, as a state machine against a model of its rules, and the rules one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxgate.inference.finding import Finding
from ctxgate.routing.health import (
    COOL_DOWN_US,
    SILENT_PROBES,
    STALLED_CONVERSATIONS,
    THRESHOLD,
    Health,
    Sign,
    began,
    ended,
    left,
    probed,
)

NOW = 1_796_040_000_000_000
A, B, C, D = b"a", b"b", b"c", b"d"
PER_CONVERSATION = (Sign.LOST, Sign.FAULT)
STEPS = st.lists(
    st.tuples(
        st.sampled_from([Sign.WELL, Sign.NEUTRAL, Sign.REFUSED, Sign.LOST, Sign.FAULT, *Finding]),
        st.sampled_from([A, B, C]),
        st.integers(0, 2 * COOL_DOWN_US),
    ),
    max_size=30,
)


def after(*signs: tuple[Sign, bytes], health: Health | None = None, now_us: int = NOW) -> Health:
    """The health after attempts ended so, one after the other."""
    health = health or Health()
    for sign, root in signs:
        health = ended(health, sign, root, now_us)
    return health


def opened(sign: Sign = Sign.FAULT) -> Health:
    """A breaker just opened by three conversations."""
    return after((sign, A), (sign, B), (sign, C))


@given(STEPS)
def test_it_is_set_aside_exactly_while_the_rules_say_so(
    steps: list[tuple[Sign | Finding, bytes, int]],
) -> None:
    health, now = Health(), NOW
    row: list[tuple[Sign, bytes]] = []  # every failure since the last success, as it came
    opened_at, up, silent, gone = None, True, 0, False
    for step, root, pause in steps:
        now += pause
        if isinstance(step, Finding):
            health = probed(health, step)
            silent = silent + 1 if step is Finding.SILENT else 0
            gone = gone or step is Finding.REFUSED
            if step is Finding.WELL:
                up = True
                if gone and all(sign is not Sign.FAULT for sign, _ in row):
                    row, opened_at, gone = [], None, False
            elif step is not Finding.SILENT or silent >= SILENT_PROBES:
                up = False
        else:
            health = ended(health, step, root, now)
            if step is Sign.WELL:
                row, opened_at, gone = [], None, False
            elif step is not Sign.NEUTRAL:
                row.append((step, root))
                gone = gone or step is Sign.REFUSED
                refusals = sum(sign is Sign.REFUSED for sign, _ in row)
                roots = {root for sign, root in row if sign is not Sign.REFUSED}
                if refusals + len(roots) >= THRESHOLD:
                    opened_at = now
        cooling = opened_at is not None and now < opened_at + COOL_DOWN_US
        assert health.healthy(now) is (up and not cooling)


def test_gateways_j4_three_failures_in_a_row_open_it_and_a_fourth_after_the_pause_opens_it_again() -> None:
    health = Health()
    for count, root in enumerate((A, B, C), start=1):
        assert health.healthy(NOW)
        health = ended(health, Sign.FAULT, root, NOW)
        assert health.failures == count
    assert not health.healthy(NOW + COOL_DOWN_US - 1)
    later = NOW + COOL_DOWN_US
    assert health.healthy(later)  # half open: one attempt may try
    assert not ended(health, Sign.FAULT, A, later).healthy(later)  # also where it is a known conversation
    assert ended(health, Sign.WELL, A, NOW).healthy(NOW)


@pytest.mark.parametrize("sign", PER_CONVERSATION)
def test_a_conversation_that_fails_again_and_again_adds_nothing(sign: Sign) -> None:
    health = after(*[(sign, A)] * 50, *[(sign, B)] * 50)
    assert health.failures == 2
    assert health.healthy(NOW)
    assert not ended(health, sign, C, NOW).healthy(NOW)


def test_what_is_remembered_of_a_failing_replica_is_bounded() -> None:
    roots = [number.to_bytes(4, "big") for number in range(1000)]
    health = after(*((Sign.FAULT, root) for root in roots), *((Sign.STALLED, root) for root in roots))
    assert health.roots == tuple(roots[-THRESHOLD:])
    assert health.stalled == tuple(roots[-STALLED_CONVERSATIONS:])


def test_a_refused_connection_counts_each_time() -> None:
    assert after(*[(Sign.REFUSED, A)] * 2).healthy(NOW)
    assert not after(*[(Sign.REFUSED, A)] * 3).healthy(NOW)
    assert not after((Sign.LOST, A), (Sign.REFUSED, A), (Sign.FAULT, B)).healthy(NOW)


@pytest.mark.parametrize("health", [Health(), after((Sign.FAULT, A), (Sign.REFUSED, A)), opened()])
def test_what_a_client_can_choose_changes_nothing(health: Health) -> None:
    assert ended(health, Sign.NEUTRAL, D, NOW) is health


def test_only_many_conversations_that_run_out_of_time_open_it() -> None:
    roots = [bytes([number]) for number in range(STALLED_CONVERSATIONS)]
    health = after(*[(Sign.STALLED, root) for root in roots[:-1]] * 10)
    assert (health.failures, health.healthy(NOW)) == (0, True)
    assert not after((Sign.STALLED, roots[-1]), health=health).healthy(NOW)
    assert after((Sign.WELL, A), (Sign.STALLED, roots[-1]), health=health).healthy(NOW)


@pytest.mark.parametrize("end", [Sign.WELL, Sign.NEUTRAL, Sign.FAULT])
def test_half_open_one_attempt_at_a_time_is_let_through(end: Sign) -> None:
    later = NOW + COOL_DOWN_US
    health = began(opened(), 7, later - 1)
    assert health.trial == 0  # still open: an attempt that goes there all the same is no trial
    health = began(health, 8, later)
    assert not health.healthy(later)
    assert began(health, 9, later) is health
    assert left(health, 9) is health  # another attempt's end does not end the trial
    health = ended(health, end, D, later)
    assert health.healthy(later) is (end is Sign.WELL)
    health = left(health, 8)
    assert health.healthy(later) is (end is not Sign.FAULT)
    assert health.healthy(later + COOL_DOWN_US)


def test_a_closed_breaker_has_no_trial() -> None:
    health = after((Sign.FAULT, A))
    assert began(health, 1, NOW) is health


def test_a_trial_of_an_earlier_opening_does_not_block_the_next() -> None:
    later = NOW + COOL_DOWN_US
    health = ended(began(opened(), 8, later), Sign.FAULT, D, later)
    health = began(health, 9, later + COOL_DOWN_US)
    assert health.trial == 9
    assert left(health, 8).trial == 9


@pytest.mark.parametrize("finding", [Finding.UNWELL, Finding.REFUSED])
def test_a_bad_answer_or_none_listening_sets_it_aside_at_once(finding: Finding) -> None:
    health = probed(Health(), finding)
    assert not health.healthy(NOW)
    assert probed(health, Finding.WELL) == Health()


def test_a_probe_without_an_answer_counts_only_three_times_in_a_row() -> None:
    health = probed(probed(Health(), Finding.SILENT), Finding.SILENT)
    assert health.healthy(NOW)
    assert not probed(health, Finding.SILENT).healthy(NOW)
    again = probed(probed(health, Finding.WELL), Finding.SILENT)
    assert again.healthy(NOW)
    down = probed(Health(), Finding.UNWELL)
    assert not probed(down, Finding.SILENT).healthy(NOW)  # silence is no proof of health


def test_a_probe_of_a_process_that_was_never_gone_leaves_the_breaker_alone() -> None:
    for health in (opened(Sign.LOST), opened(Sign.FAULT)):
        assert not probed(probed(health, Finding.UNWELL), Finding.WELL).healthy(NOW)
    assert probed(after((Sign.LOST, A)), Finding.WELL).failures == 1


@pytest.mark.parametrize("seen_by", ["attempts", "probe"])
def test_a_process_that_was_gone_and_is_back_starts_anew(seen_by: str) -> None:
    if seen_by == "attempts":
        health = after(*[(Sign.REFUSED, A)] * 3)
    else:
        health = probed(opened(Sign.LOST), Finding.REFUSED)
    assert not health.healthy(NOW)
    assert probed(health, Finding.WELL) == Health()


def test_failures_that_the_engine_reported_outlast_a_restart() -> None:
    health = after((Sign.FAULT, A), (Sign.LOST, B), (Sign.REFUSED, C))  # one of them is enough
    health = probed(health, Finding.WELL)
    assert not health.healthy(NOW)
    assert health.healthy(NOW + COOL_DOWN_US)
