"""What has been sent stays sent while a conversation grows.

Heads of many lines, words of any length, and turns whose messages can hold no note or come one by one.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxgate.compression.expressions import Expression
from ctxgate.compression.moved import HEADING, PLACEHOLDER
from ctxgate.compression.policy import Level, Policy
from ctxgate.compression.volatile import VolatileKind
from support.declared import Document, message, raw
from support.forms import Forms, Process

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.integration

POLICY = Policy(
    Level.DECLARED,
    kinds=frozenset({VolatileKind.CLOCK}),
    patterns=(Expression.compile(r"<(?P<value>[^>]+)>"),),
)
LEARNED = Policy(Level.LEARNED, kinds=POLICY.kinds, patterns=POLICY.patterns)
contents = st.sampled_from(["go", "x" * 3_000, "x" * 90_000, None, [], [{"type": "text", "text": "go"}]])
words = st.sampled_from(["1", "2", "w" * 40, "v" * 900, "u" * 20_000])


@st.composite
def turns(draw: st.DrawFn) -> list[list[Document]]:
    """What each request adds: users, results together or one by one, and messages that take no note."""
    found: list[list[Document]] = [[message("user", draw(contents))]]
    for number in range(draw(st.integers(1, 6))):
        ids = [f"c{number}-{at}" for at in range(draw(st.integers(1, 3)))]
        calls = [{"id": id_, "type": "function", "function": {"name": "f", "arguments": "{}"}} for id_ in ids]
        results = [message("tool", draw(contents), tool_call_id=id_) for id_ in ids]
        asked = message("assistant", None, tool_calls=calls)
        kind = draw(st.sampled_from(["user", "together", "one by one", "late", "system", "function"]))
        if kind == "together":
            found.append([asked, *results])
        elif kind == "one by one":
            found.append([asked, results[0]])
            found += [[each] for each in results[1:]]
        elif kind == "late":  # behind what the last request ended with
            found.append([message("system", "Be quick.")])
        else:
            more = {"name": "f"} if kind == "function" else {}
            found.append([message("assistant", "ok"), message(kind, draw(contents), **more)])
    return found


def head(number: int, values: Sequence[str]) -> Document:
    lines = [f"Line {at} <{value}>" for at, value in enumerate(values)]  # each costs 17 + 8 + 2 bytes or more
    return message("system", "\n".join([f"Now 2026-01-05T09:{number:02}:00Z", *lines]))


def texts(each: Document) -> list[str]:
    content: Any = each["content"]
    if isinstance(content, list):
        return [part["text"] for part in content]
    return [] if content is None else [content]


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 120), turns(), st.data())
def test_no_turn_takes_back_what_was_sent(
    count: int, added: list[list[Document]], data: st.DataObject
) -> None:
    """Invariant 2, whatever the head holds, however the prompt grows, and whichever process lays it out."""
    forms, policy = Forms(), data.draw(st.sampled_from([POLICY, LEARNED]))
    fleet = [Process(forms, policy=policy), Process(forms, policy=policy)]
    history: list[Document] = []
    before: list[Document] = []
    moves: set[bool] = set()
    kept = True
    for number, new in enumerate(added):
        history += new
        values = [data.draw(words), *[data.draw(words)[:40]] * count][:count]
        process = data.draw(st.sampled_from([*fleet, Process(forms, policy=policy)]))
        body = raw(head(number, values), *history)
        result = process.result(body)
        out: list[Document] = json.loads(process.checked(body))["messages"]
        moves.add(PLACEHOLDER in out[0]["content"])
        if not result.moved:
            assert out == [head(number, values), *history]
            continue
        size = _first_that_differs(before, out)
        assert size >= (len(before) if kept else _end_of_the_turn_before(before))
        said = "\n".join(text for each in out for text in texts(each) if HEADING in text)
        for passage in result.moved:
            assert passage.waits or passage.line in said, "every word is said"
            label = passage.line[: passage.line.find("<") + 1] or "Now "
            assert label in said, "and if not as it is now, then as it was"
        kept = not any("do not repeat" in reason.reason for reason in result.reasons)
        before = out
    assert len(moves) == 1


def _first_that_differs(one: Sequence[Document], two: Sequence[Document]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), len(one))


def _end_of_the_turn_before(messages: Sequence[Document]) -> int:
    """Where a prompt's last turn begins: a note that is not kept stands there, or at the end before it."""
    last = max((at for at, each in enumerate(messages) if each["role"] == "assistant"), default=0)
    earlier = [at for at in range(last) if messages[at]["role"] in ("user", "tool")]
    return earlier[-1] if earlier else 0
