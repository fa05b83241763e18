"""The checker lets the same prompt in another form pass, and nothing else."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from ctxgate.compression.dialects.chat import Facts, ToolFacts
from ctxgate.compression.layout import Prompt
from ctxgate.compression.validity import Invalid, check_length, check_same, pairing_faults


def facts(role: str, *calls: str, answers: str | None = None) -> Facts:
    text = f"{role} {calls} {answers}".encode()
    return Facts(text.ljust(32)[:32], len(text), role, bool(calls), calls, answers)


USER, CALLS = facts("user"), facts("assistant", "a", "b")
A, B = facts("tool", answers="a"), facts("tool", answers="b")
ONE, TWO = ToolFacts(b"1" * 32, 9, "one"), ToolFacts(b"2" * 32, 9, "two")
PROMPT = Prompt((USER, CALLS, A, B), (ONE, TWO))


def test_tools_may_change_places() -> None:
    check_same(PROMPT, PROMPT)
    check_same(PROMPT, replace(PROMPT, tools=(TWO, ONE)))


@pytest.mark.parametrize(
    ("after", "reason"),
    [
        ({"facts": (USER, CALLS, A)}, "count"),
        ({"facts": (USER, CALLS, A, B, B)}, "count"),
        ({"facts": (CALLS, USER, A, B)}, "roles"),
        ({"facts": (USER, CALLS, B, A)}, "messages"),
        ({"facts": (USER, facts("assistant", "a", "c"), A, B)}, "messages"),
        ({"tools": (ONE,)}, "tools"),
        ({"tools": (ONE, ONE)}, "tools"),
        ({"tools": (ONE, TWO, TWO)}, "tools"),
        ({"tools": None}, "tools"),
    ],
)
def test_another_prompt_is_refused(after: dict[str, Any], reason: str) -> None:
    with pytest.raises(Invalid) as caught:
        check_same(PROMPT, replace(PROMPT, **after))
    assert caught.value.reason == reason


def test_a_clients_own_faults_pass() -> None:
    broken = replace(PROMPT, facts=(A, USER, CALLS, USER))
    check_same(broken, broken)


@pytest.mark.parametrize(
    ("messages", "faults"),
    [
        ((USER, CALLS, A, B, USER), {}),
        ((USER, CALLS, B, A), {}),
        ((USER, CALLS), {}),  # the answers may still come
        ((USER, A), {"orphan": 1}),
        ((A, CALLS, B, USER), {"orphan": 1, "unanswered": 1}),
        ((CALLS, A, A, B), {"twice": 1}),
        ((CALLS, USER, A, B), {"unanswered": 2}),
        ((CALLS, A, USER, facts("assistant", "a"), A), {"unanswered": 1}),
        ((facts("tool"),), {"orphan": 1}),
    ],
)
def test_context_a_faults_between_calls_and_results_are_counted(
    messages: tuple[Facts, ...], faults: dict[str, int]
) -> None:
    assert +pairing_faults(messages) == Counter(faults)


def test_growth_is_bounded_at_one_percent() -> None:
    """900 bytes of messages and 100 of tools: 10 more pass, 11 do not."""
    before = Prompt((replace(USER, size=900),), (replace(ONE, size=100),))
    check_length(before, Prompt((replace(USER, size=905),), (replace(ONE, size=105),)))
    check_length(before, Prompt((replace(USER, size=1),), None))
    with pytest.raises(Invalid) as caught:
        check_length(before, Prompt((replace(USER, size=911),), (replace(ONE, size=100),)))
    assert caught.value.reason == "longer"
