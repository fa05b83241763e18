"""From an answer to what it used: shapes of prompts, costs put in place, and what is estimated."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxgate.gateway.metering import Basis, finish_reason, nothing_reported, prompt_count, with_cost
from ctxgate.inference.estimate import TokenRatio
from ctxgate.inference.usage import UNKNOWN, estimated
from ctxgate.inference.wire import parse


@pytest.mark.parametrize(
    ("prompt", "count"),
    [
        ('"text"', 1),
        ("[1,2,3]", 1),
        ("[ 1 , 2 ]", 1),
        ("[[1,2],[3]]", 2),
        ('["a","b","c"]', 3),
        ('[\n "a" ]', 1),
        ('["a",[1]]', 2),
        ("[]", 1),
        ("[ ]", 1),
        ("null", 1),
        ("7", 1),
        ("{}", 1),
        ("[-1]", 1),
        ("[null]", 1),
        ("[" + " " * 200 + '"a","b"]', 2),
    ],
)
def test_how_many_prompts_a_call_holds(prompt: str, count: int) -> None:
    assert prompt_count(parse(f'{{"prompt":{prompt}}}'.encode())) == count


def test_a_long_list_of_token_ids_is_told_by_its_beginning() -> None:
    class Watched:
        """A body whose items may not be asked for."""

        def __init__(self, raw: bytes) -> None:
            self._body = parse(raw)

        def get(self, name: str) -> Any:
            return self._body.get(name)

        def items(self, name: str) -> Any:
            raise AssertionError("decoded a million numbers to see that they are numbers")

    assert prompt_count(Watched(b'{"prompt":[1,2,3]}')) == 1  # type: ignore[arg-type] # stands in for one


USAGES = st.dictionaries(
    st.sampled_from(["prompt_tokens", "completion_tokens", "details"]),
    st.integers(0, 9) | st.dictionaries(st.just("cached_tokens"), st.integers(0, 9)),
    min_size=1,
)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=20) | st.sampled_from(['"usage":{"a":1}', "}", "{"])


@given(USAGES, TEXTS, st.integers(0, 10**15), st.permutations(["usage", "choices", "id"]), st.booleans())
def test_the_cost_is_put_into_the_usage_and_nothing_else_changes(
    usage: dict[str, Any], text: str, cost: int, order: list[str], ascii_only: bool
) -> None:
    members = {"usage": usage, "choices": [{"text": text, "usage": usage}], "id": text}
    document = {name: members[name] for name in order}
    raw = json.dumps(document, ensure_ascii=ascii_only).encode()
    changed = with_cost(raw, cost)
    found = json.loads(changed)
    shown = found["usage"].pop("cost")
    assert found == document
    assert shown == pytest.approx(cost / 1e9, rel=1e-12)
    event = with_cost(b"data: " + raw + b"\n\n", cost)
    assert event == b"data: " + changed + b"\n\n"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{}",
        b"null",
        b"data: [DONE]\n\n",
        b'{"usage":null}',
        b'{"usage":{}}',
        b'{"usage":7}',
        b"{broken}",
    ],
)
def test_an_answer_without_usage_is_left_alone(raw: bytes) -> None:
    assert with_cost(raw, 5) == raw


def test_what_is_estimated_where_nothing_was_said() -> None:
    basis = Basis(100, 60, TokenRatio())
    usage = nothing_reported(basis)
    assert (usage.uncached, usage.cached, usage.output) == (estimated(40), estimated(60), UNKNOWN)
    assert nothing_reported(Basis(None, None, TokenRatio())).prompt is None


def test_the_first_choices_reason_is_the_calls() -> None:
    assert finish_reason({}) is None
    assert finish_reason({2: "length", 0: "stop", 1: "abort"}) == "stop"
