"""Whatever a conversation does: what is compacted stays so, for every process, and nothing is ever broken."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxgate.compression.user_rules import user_rules
from support.compacting import CompactingProcess, messages_of

pytestmark = pytest.mark.integration

SYSTEM = {"role": "system", "content": "You are an agent."}
TASK = {"role": "user", "content": "Port the billing service. Never touch main."}


@st.composite
def turns(draw: st.DrawFn) -> list[list[dict[str, Any]]]:
    """What is added to a conversation before each request; a request ends with a user or tool message."""
    found: list[list[dict[str, Any]]] = [[SYSTEM, TASK]]
    for number in range(draw(st.integers(1, 12))):
        calls = draw(st.integers(0, 2))
        sizes = [draw(st.sampled_from([5, 80, 400])) for _ in range(calls)]
        if not calls:
            rule = draw(st.booleans())
            text = (
                f"You must keep file {number} unchanged."
                if rule
                else "Go on. " + "x " * draw(st.integers(0, 200))
            )
            found.append(
                [{"role": "assistant", "content": f"Done {number}."}, {"role": "user", "content": text}]
            )
            continue
        made = [
            {"id": f"c{number}-{each}", "type": "function", "function": {"name": "run", "arguments": "{}"}}
            for each in range(calls)
        ]
        results = [
            {"role": "tool", "tool_call_id": f"c{number}-{each}", "content": f"{number} " * size}
            for each, size in enumerate(sizes)
        ]
        found.append([{"role": "assistant", "content": None, "tool_calls": made}, *results])
    return found


@settings(deadline=None, max_examples=25)
@given(turns(), st.integers(900, 3000))
def test_gateways_n2_every_request_extends_the_one_before_but_at_recorded_compactions(
    added: list[list[dict[str, Any]]], most: int
) -> None:
    process = CompactingProcess()
    history: list[dict[str, Any]] = []
    before: list[dict[str, Any]] = []
    for each in added:
        history = history + each
        recorded = len(process.made)
        out = process.sent(history, most)
        sent = messages_of(out)
        if len(process.made) == recorded:
            assert sent[: len(before)] == before
        assert sent[:2] == [SYSTEM, TASK]
        assert sent[-1]["role"] == history[-1]["role"]
        said = json.dumps(sent)
        rules = [rule for one in history if one["role"] == "user" for rule in user_rules(one["content"])]
        assert all(json.dumps(rule)[1:-1] in said for rule in rules)
        # Any other process sends the same bytes, and knows of no more to leave out.
        assert CompactingProcess(process.forms).sent(history) == out
        before = sent


@settings(deadline=None, max_examples=25)
@given(turns(), st.integers(900, 2000), st.data())
def test_forks_share_what_they_share_and_an_edit_falls_back_to_the_longest_prefix(
    added: list[list[dict[str, Any]]], most: int, data: st.DataObject
) -> None:
    process = CompactingProcess()
    history: list[dict[str, Any]] = []
    for each in added:
        history = history + each
        process.sent(history, most)
    if not process.made:
        return
    last = process.made[-1]
    fork = [*history, {"role": "assistant", "content": "Other."}, {"role": "user", "content": "Fork."}]
    assert messages_of(process.sent(fork))[:-2] == messages_of(process.sent(history))
    at = data.draw(st.integers(2, len(history) - 1))
    edited = [*history]
    edited[at] = edited[at] | {"content": "Edited."}
    applied = messages_of(CompactingProcess(process.forms).sent(edited))
    held = [record for record in process.made if record.covers <= at]
    if at >= last.covers:
        assert len(applied) == len(messages_of(process.sent(history)))
    elif not held:
        assert applied == edited
    else:
        gone = sorted(held, key=lambda record: record.covers)[-1].gone()  # of equal ones the later
        assert len(applied) == len(edited) - len(gone) + bool(gone)
