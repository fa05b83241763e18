"""What holds of results that are shortened on arrival, whatever conversation, processes and limits."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxgate.compression.arrivals import ArrivalPolicy
from support.arriving import DONE, USER, Process, call, raws, result
from support.forms import Forms

pytestmark = pytest.mark.integration

words = st.sampled_from(["alpha", "beta", "ERROR: gamma", "{", "delta 17", "/usr/lib/x.py:3"])
contents = st.builds(
    lambda line, times: "\n".join([" ".join(line)] * times), st.lists(words), st.integers(1, 150)
)
turns = st.lists(st.lists(contents, min_size=1, max_size=3), min_size=1, max_size=6)
limits = st.integers(0, 8000)


def conversation(batches: list[list[str]], ids: str) -> list[list[dict[str, Any]]]:
    """The messages of each request: one more batch of results in each."""
    messages: list[dict[str, Any]] = [USER]
    found = []
    for number, batch in enumerate(batches):
        names = [f"{ids}{number}-{at}" for at in range(len(batch))]
        calls = [call(name)["tool_calls"][0] for name in names]
        messages = [*messages, {**call(""), "tool_calls": calls}]
        messages += [result(name, text) for name, text in zip(names, batch, strict=True)]
        found.append(messages)
        messages = [*messages, DONE]
    return found


def said(process: Process, messages: list[dict[str, Any]]) -> list[Any]:
    """The contents that go out; everything else of a message stays."""
    sent = raws(messages)
    out = process.arrived(sent).texts
    whole = [json.loads(out.get(at, raw)) for at, raw in enumerate(sent)]
    assert [{**each, "content": 0} for each in whole] == [{**each, "content": 0} for each in messages]
    return [each["content"] for each in whole]


@settings(max_examples=60, deadline=None)
@given(
    batches=turns,
    off=st.integers(0, 6),
    plan=st.lists(st.tuples(st.integers(0, 1), limits, st.booleans()), min_size=6, max_size=6),
)
def test_gateways_n2_every_request_extends_the_one_before(
    batches: list[list[str]], off: int, plan: list[tuple[int, int, bool]]
) -> None:
    """The feature comes on before request `off`; any process, restarted or not, with any limit, new ids."""
    forms = Forms()
    fleet = [Process(forms), Process(forms)]
    before: list[Any] = []
    for number, (which, limit, restart) in enumerate(plan[: len(batches)]):
        messages = conversation(batches, f"r{number}-")[number]
        if restart:
            fleet[which] = Process(forms)
        fleet[which].policy = ArrivalPolicy(limit)
        now = [each["content"] for each in messages]
        if number >= off:
            now = said(fleet[which], messages)
            assert said(fleet[1 - which], messages) == now
        assert now[: len(before)] == before
        # Nothing is longer than it came, and what arrived is within the limit or as it came.
        for came, goes in zip(messages, now, strict=True):
            assert goes == came["content"] or len(goes.encode()) < len(came["content"].encode())
        before = now


@settings(max_examples=40, deadline=None)
@given(batches=turns, limit=limits, cut=st.integers(1, 6))
def test_what_was_shortened_stays_so_when_the_history_is_cut(
    batches: list[list[str]], limit: int, cut: int
) -> None:
    process = Process(policy=ArrivalPolicy(limit))
    requests = conversation([[f"{at} {text}" for at, text in enumerate(batch)] for batch in batches], "c")
    for number, messages in enumerate(requests):
        for each in messages:
            if each["role"] == "tool":  # no two results say the same, so that none takes another's place
                each["content"] = f"{each['tool_call_id']} {each['content']}"
        now = said(process, messages)
        if number >= cut:
            starts = [at for at, each in enumerate(messages) if each.get("tool_calls")]
            start = starts[min(cut, len(starts) - 1)]
            assert said(process, [USER, *messages[start:]])[1:] == now[start:]
