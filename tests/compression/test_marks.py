"""Marks of stability: what they move, what they keep in its place, and how a wrong one is told."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest

from ctxgate.compression.marks import MarkError
from ctxgate.compression.moved import HEADING, PLACEHOLDER
from ctxgate.compression.policy import Level, Policy
from support.declared import (
    CLOCK,
    EPHEMERAL,
    MARKED,
    STABLE,
    VOLATILE,
    Document,
    call,
    message,
    note,
    part,
    raw,
    sent,
    system,
)
from support.forms import Process


@pytest.fixture
def process() -> Process:
    return Process(policy=CLOCK)


def test_a_part_marked_volatile_moves_from_its_first_sight_on() -> None:
    process = Process(policy=MARKED)
    first = message("user", [part("Env: a", **VOLATILE), part("Go.")])
    moved = message("user", [part(PLACEHOLDER), part("Go."), part(f"{HEADING}\nEnv: a")])
    assert sent(process, first) == [moved]
    assert sent(process, first, *call(0)) == [moved, *call(0)], "and is not said again"
    refreshed = message("user", [part("Env: b", **VOLATILE), part("Go.")])
    out = sent(process, refreshed, *call(0), message("user", "More."))
    assert out == [moved, *call(0), message("user", f"More.\n\n{HEADING}\nEnv: b")]


def test_environment_blocks_of_every_user_turn_are_said_where_they_were() -> None:
    process = Process(policy=MARKED)
    turns = [message("user", [part("Do."), part(f"Env: {number}", **VOLATILE)]) for number in range(3)]
    history: list[Document] = []
    out: list[list[Document]] = []
    for turn in turns:
        history.append(turn)
        out.append(sent(process, *history))
        history.append(message("assistant", "Done."))
    for before, after in pairwise(out):
        assert after[: len(before)] == before
    assert [each["content"][-1]["text"] for each in out[2][::2]] == [
        f"{HEADING}\nEnv: {number}" for number in range(3)
    ]


def test_a_message_marked_volatile_moves_as_a_whole() -> None:
    process = Process(policy=MARKED)
    out = sent(process, message("system", "Mood: calm", **VOLATILE), message("user", "Go."))
    assert out == [message("system", PLACEHOLDER), message("user", f"Go.\n\n{HEADING}\nMood: calm")]


def test_marks_are_taken_off_and_cache_marks_pass() -> None:
    process = Process(policy=MARKED)
    messages = [
        message("system", [part("a", **STABLE), part("b", **EPHEMERAL)], **STABLE),
        message("user", "Go.", ctxgate=None, cache_control={"type": "ephemeral"}),
        message("assistant", "Yes.", **STABLE),
    ]
    assert sent(process, *messages) == [
        message("system", [part("a"), part("b", **EPHEMERAL)]),
        message("user", "Go.", **EPHEMERAL),
        message("assistant", "Yes."),
    ]
    reasons = process.result(raw(*messages)).reasons
    assert [(each.field, each.reason) for each in reasons] == [
        (f"messages[{at}]", "the gateway's marks taken off") for at in range(3)
    ]


def test_stable_text_stays_whatever_is_in_it(process: Process) -> None:
    clock = "Now 2026-01-05T09:00:00Z"
    out = sent(process, message("system", [part(clock, **STABLE), part(clock)]), message("user", "Go."))
    assert out[0]["content"] == [part(clock), part(f"Now {PLACEHOLDER}")]


def test_context_j8_what_a_cache_mark_covers_stays(process: Process) -> None:
    clock = "Now 2026-01-05T09:00:00Z"
    out = sent(
        process,
        message("system", clock),
        message("developer", [part(clock), part(clock, **EPHEMERAL), part(clock)]),
        message("system", clock),
        message("user", "Go."),
    )
    assert [out[0], out[1]["content"], out[2]["content"]] == [
        message("system", clock),
        [part(clock), part(clock, **EPHEMERAL), part(f"Now {PLACEHOLDER}")],
        f"Now {PLACEHOLDER}",
    ]


def test_a_volatile_mark_counts_before_a_cache_mark() -> None:
    process = Process(policy=MARKED)
    content = [part("Mood: calm", **VOLATILE, **EPHEMERAL), part("b", **EPHEMERAL)]
    out = sent(process, message("system", content), message("user", "Go."))
    assert out[0]["content"] == [part(PLACEHOLDER, **EPHEMERAL), part("b", **EPHEMERAL)]


def test_context_k7_a_cache_mark_that_wanders_loses_no_note(process: Process) -> None:
    """Clients put it on their last message, and take it off the one before."""
    first = sent(process, system(0), message("user", [part("Go.", **EPHEMERAL)]))
    out = sent(process, system(1), message("user", [part("Go.")]), *call(0))
    assert first[1]["content"] == [part("Go.", **EPHEMERAL), part(note(0))]
    assert out[1]["content"] == [part("Go."), part(note(0))]


def test_a_cache_mark_on_a_call_is_not_carried_to_later_turns(process: Process) -> None:
    """Other forms of the call go out as they came, so that no mark of an old turn comes back."""
    answer, result = call(0)
    marked = [answer | EPHEMERAL, result]
    sent(process, system(0), message("user", "Go."), *marked)
    for form in (answer | {"content": ""}, {k: v for k, v in answer.items() if k != "content"}):
        out = sent(process, system(1), message("user", "Go."), form | EPHEMERAL, result)
        assert out[2] == form | EPHEMERAL
    out = sent(process, system(2), message("user", "Go."), answer, result, message("user", "On."))
    assert "cache_control" not in json.dumps(out)


def test_gateways_l4_context_k1_no_cache_mark_is_added(process: Process) -> None:
    messages = [system(0), message("user", [part(f"{at}", **EPHEMERAL) for at in range(4)])]
    out = process.checked(raw(*messages))
    assert out.count(b"cache_control") == 4


@pytest.mark.parametrize("level", [Level.SAFE, Level.DECLARED])
@pytest.mark.parametrize(
    ("wrong", "field", "problem"),
    [
        (message("user", "x", ctxgate="volatile"), "messages[1].ctxgate", "must be an object"),
        (message("user", "x", ctxgate=[]), "messages[1].ctxgate", "must be an object"),
        (message("user", "x", ctxgate={"x": "y" * 300}), "messages[1].ctxgate", "must be an object"),
        (message("user", "x", ctxgate={}), "messages[1].ctxgate.stability", "must be 'stable' or 'volatile'"),
        (
            message("user", "x", ctxgate={"stability": "Stable"}),
            "messages[1].ctxgate.stability",
            "must be 'stable' or 'volatile'",
        ),
        (
            message("user", "x", ctxgate={"stability": ["stable"]}),
            "messages[1].ctxgate.stability",
            "must be 'stable' or 'volatile'",
        ),
        (
            message("user", "x", ctxgate={"stability": "stable", "until": 1}),
            "messages[1].ctxgate",
            "must hold 'stability' or 'pin' alone",
        ),
        (message("user", "x", ctxgate={"pin": 1}), "messages[1].ctxgate.pin", "must be true or false"),
        (
            message("user", "x", ctxgate={"pin": True, "stability": 1}),
            "messages[1].ctxgate.stability",
            "must be 'stable' or 'volatile'",
        ),
        (
            message("user", [part("a"), part("b", ctxgate=7)]),
            "messages[1].content[1].ctxgate",
            "must be an object",
        ),
        (message("assistant", "x", **VOLATILE), "messages[1].ctxgate", "is for system, developer, user"),
        (message("user", None, **VOLATILE), "messages[1].content", "is no well-formed text"),
        ({"role": "user", **VOLATILE}, "messages[1].ctxgate", "the message has no content"),
        (
            message("user", [{"type": "image_url", "image_url": {"url": "data:,"}, **VOLATILE}]),
            "messages[1].content[0]",
            "is no well-formed text",
        ),
    ],
)
def test_a_wrong_mark_is_named(level: Level, wrong: Document, field: str, problem: str) -> None:
    process = Process(policy=Policy(level))
    for _ in range(2):
        with pytest.raises(MarkError, match=re.escape(problem)) as caught:
            process.result(raw(message("system", "s"), wrong))
        assert caught.value.field == field
        assert str(caught.value).startswith(f"'{field}'")


@pytest.mark.parametrize("level", [Level.SAFE, Level.DECLARED])
@pytest.mark.parametrize("pin", [True, False])
def test_a_pin_is_no_word_on_stability(level: Level, pin: bool) -> None:
    process = Process(policy=Policy(level))
    result = process.result(raw(message("system", "s"), message("user", "Go.", ctxgate={"pin": pin})))
    assert result.moved == ()
    assert result.dropped is None


def test_marks_are_the_engines_business_below_declared() -> None:
    process = Process()
    body = raw(message("system", "a", **VOLATILE), message("user", "Go.", **STABLE))
    assert process.result(body).edits == ()
