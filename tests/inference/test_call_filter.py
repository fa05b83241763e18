"""Calls of one tool are taken out of an answer, and nothing else of it changes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ctxgate.inference.call_filter import CallFilter, Hearing, Spoken, spoken_of, take_calls
from support.hearing import spoken_in
from support.upstream import event_bytes

TOOL = "context_recall"


def chunk(delta: dict[str, Any], reason: str | None = None, **more: Any) -> bytes:
    return event_bytes({"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]} | more)


def part(index: int, name: str | None = None, arguments: str = "", id_: str | None = None) -> dict[str, Any]:
    function = {"arguments": arguments} | ({} if name is None else {"name": name})
    return {"index": index, "function": function} | ({} if id_ is None else {"id": id_, "type": "function"})


def deltas(out: bytes) -> list[dict[str, Any]]:
    return [
        choice["delta"]
        for event in out.split(b"\n\n")
        if event
        for choice in json.loads(event.removeprefix(b"data: "))["choices"]
    ]


def test_text_passes_as_the_very_bytes_that_came() -> None:
    passing = CallFilter(TOOL)
    out = b'data: {"choices":[{"delta":{"content":"a context_recall of tool_calls"}}]}\n\n: comment\n\n'
    assert passing.take(out) is out
    assert not passing.own


def test_calls_of_others_pass_as_the_very_bytes_that_came() -> None:
    passing = CallFilter(TOOL)
    events = [
        chunk({"tool_calls": [part(0, "read", "", "a")]}),
        chunk({"tool_calls": [part(0, arguments='{"p":')]}),
        chunk({"tool_calls": [part(0, arguments="1}"), part(1, "ctx", "{}", "b")]}),
        chunk({}, "tool_calls"),
        b"data: [DONE]\n\n",
    ]
    assert [passing.take(event) for event in events] == events
    assert not passing.goes_on


def test_a_call_alone_vanishes_with_the_end_and_its_usage() -> None:
    passing = CallFilter(TOOL)
    first = chunk({"role": "assistant", "content": ""})
    assert passing.take(first) == first
    assert passing.take(chunk({"tool_calls": [part(0, TOOL, '{"q', "a")]})) == b""
    assert passing.take(chunk({"tool_calls": [part(0, arguments='":1}')]})) == b""
    assert passing.take(chunk({}, "tool_calls")) == b""
    assert passing.goes_on
    assert passing.take(event_bytes({"id": "x", "choices": [], "usage": {"prompt_tokens": 3}})) == b""
    assert passing.usage == {"prompt_tokens": 3}
    (own,) = passing.own
    assert (own.place, own.id, own.arguments) == (0, "a", '{"q":1}')


def test_text_beside_a_call_stays() -> None:
    passing = CallFilter(TOOL)
    out = passing.take(chunk({"content": "I look.", "tool_calls": [part(0, TOOL, "{}", "a")]}, "tool_calls"))
    assert deltas(out) == [{"content": "I look."}]
    assert passing.goes_on


def test_an_error_after_the_end_is_not_kept_back() -> None:
    passing = CallFilter(TOOL)
    passing.take(chunk({"tool_calls": [part(0, TOOL, "{}", "a")]}, "tool_calls"))
    error = event_bytes({"error": {"message": "m"}})
    assert passing.take(error) == error


@pytest.mark.parametrize(
    ("reason", "shown"), [("tool_calls", "stop"), ("stop", "stop"), ("length", "length")]
)
def test_an_answer_that_is_not_taken_on_ends_without_the_call(reason: str, shown: str) -> None:
    passing = CallFilter(TOOL, answers=False)
    assert passing.take(chunk({"tool_calls": [part(0, TOOL, "{}", "a")]})) == b""
    out = json.loads(passing.take(chunk({}, reason)).removeprefix(b"data: "))
    assert out["choices"][0]["finish_reason"] == shown
    assert not passing.goes_on


def test_a_call_that_was_cut_is_not_answered() -> None:
    passing = CallFilter(TOOL)
    passing.take(chunk({"tool_calls": [part(0, TOOL, '{"q', "a")]}))
    out = json.loads(passing.take(chunk({}, "length")).removeprefix(b"data: "))
    assert out["choices"][0]["finish_reason"] == "length"
    assert not passing.goes_on


def test_a_name_that_comes_in_pieces_waits_until_it_is_whole() -> None:
    passing = CallFilter(TOOL)
    assert passing.take(chunk({"tool_calls": [part(0, "context_", "", "a")]})) == b""
    out = passing.take(chunk({"tool_calls": [part(0, "menu", "{}")]}))
    assert deltas(out) == [{"tool_calls": [part(0, "context_", "", "a"), part(0, "menu", "{}")]}]
    own = CallFilter(TOOL)
    own.take(chunk({"tool_calls": [part(0, "context_", "", "a")]}))
    own.take(chunk({"tool_calls": [part(0, "recall", "{")]}))
    own.take(chunk({"tool_calls": [part(0, arguments="}")]}))
    assert [(each.id, each.arguments) for each in own.own] == [("a", "{}")]


def test_a_tool_whose_name_begins_alike_waits_for_its_arguments_only() -> None:
    passing = CallFilter(TOOL)
    assert passing.take(chunk({"tool_calls": [part(0, "context", "", "a")]})) == b""
    out = passing.take(chunk({"tool_calls": [part(0, arguments="{}")]}))
    assert deltas(out) == [{"tool_calls": [part(0, "context", "", "a"), part(0, arguments="{}")]}]


def test_a_name_that_never_gets_whole_is_the_clients() -> None:
    passing = CallFilter(TOOL)
    assert passing.take(chunk({"tool_calls": [part(0, "context", "{}", "a")]})) == b""
    out = passing.take(chunk({}, "tool_calls"))
    assert deltas(out) == [{"tool_calls": [part(0, "context", "{}", "a")]}]


def test_calls_are_taken_out_of_a_whole_answer() -> None:
    calls = [
        {"id": "a", "function": {"name": "read", "arguments": "{}"}},
        {"id": "b", "function": {"name": TOOL, "arguments": '{"query":"x"}'}},
    ]
    choice: dict[str, Any] = {"message": {"tool_calls": list(calls)}, "finish_reason": "tool_calls"}
    (own,) = take_calls(choice, TOOL)
    assert (own.place, own.id, own.arguments) == (1, "b", '{"query":"x"}')
    assert choice == {"message": {"tool_calls": calls[:1]}, "finish_reason": "tool_calls"}
    alone: dict[str, Any] = {"message": {"tool_calls": calls[1:]}, "finish_reason": "tool_calls"}
    assert take_calls(alone, TOOL)
    assert alone == {"message": {}, "finish_reason": "stop"}


def test_what_was_said_is_read_off_events_and_off_an_answer() -> None:
    events = [
        chunk({"role": "assistant", "content": ""}),
        chunk({"reasoning": "Hm"}),
        chunk({"content": "a"}),
        chunk({"content": "b", "tool_calls": [part(0, "read", "{", "x")]}),
        chunk({"tool_calls": [part(1, "write", "[]", "y"), part(0, arguments="}")]}),
        chunk({}, "tool_calls"),
        b"data: [DONE]\n\n",
    ]
    said = Spoken("ab", "Hm", "reasoning", "tool_calls", [("read", "{}"), ("write", "[]")])
    assert spoken_in(b"".join(events)) == said
    message = {
        "content": "ab",
        "reasoning": "Hm",
        "tool_calls": [
            {"function": {"name": "read", "arguments": "{}"}},
            {"function": {"name": "write", "arguments": "[]"}},
        ],
    }
    assert spoken_of(message) == Spoken("ab", "Hm", "reasoning", None, said.calls)


def test_calls_without_numbers_are_told_apart_by_their_ids() -> None:
    passing = CallFilter(TOOL)

    def unnumbered(name: str, id_: str, arguments: str = "") -> dict[str, Any]:
        return {"id": id_, "function": {"name": name, "arguments": arguments}}

    out = passing.take(chunk({"tool_calls": [unnumbered("read", "a", "{}"), unnumbered(TOOL, "b", '{"q')]}))
    out += passing.take(chunk({"tool_calls": [{"function": {"arguments": '":1}'}}]}))
    out += passing.take(chunk({"tool_calls": [unnumbered("write", "c", "{}")]}))
    shown = [call for delta in deltas(out) for call in delta["tool_calls"]]
    assert [(call["index"], call["id"]) for call in shown] == [(0, "a"), (1, "c")]
    assert [(call.place, call.id, call.arguments) for call in passing.own] == [(1, "b", '{"q":1}')]


def test_arguments_that_are_no_text_are_spelled_as_one() -> None:
    made = {"id": "b", "function": {"name": TOOL, "arguments": {"query": "x"}}}
    choice: dict[str, Any] = {"message": {"tool_calls": [made]}, "finish_reason": "tool_calls"}
    (own,) = take_calls(choice, TOOL)
    assert json.loads(own.arguments) == {"query": "x"}
    passing = CallFilter(TOOL)
    passing.take(chunk({"tool_calls": [{"index": 0, **made}]}))
    assert json.loads(passing.own[0].arguments) == {"query": "x"}


def test_single_tokens_are_told_but_for_those_of_a_call_that_was_taken_out() -> None:
    tokens = {"content": [{"token": "x"}]}
    passing = CallFilter(TOOL)
    for part_of, told in ((part(0, TOOL, "{}", "a"), None), (part(1, "read", "{}", "b"), tokens)):
        delta = {"content": "t", "tool_calls": [part_of]}
        choice = {"index": 0, "delta": delta, "logprobs": tokens, "finish_reason": None}
        (event,) = [each for each in passing.take(event_bytes({"choices": [choice]})).split(b"\n\n") if each]
        assert json.loads(event.removeprefix(b"data: "))["choices"][0]["logprobs"] == told


def test_what_was_said_is_the_same_however_it_was_cut() -> None:
    events = [chunk({"reasoning": f"t{n}", "content": f"c{n} "}) for n in range(50)]
    events += [
        chunk({"tool_calls": [part(0, "read", "{", "a")]}),
        chunk({"tool_calls": [part(0, None, "}")]}),
    ]
    events.append(chunk({}, "tool_calls"))
    whole = spoken_in(b"".join(events))
    assert (whole.calls, whole.reason) == ([("read", "{}")], "tool_calls")
    assert whole.text == "".join(f"c{n} " for n in range(50))
    for size in (1, 7, 53):
        hearing = Hearing()
        for at in range(0, len(events), size):
            hearing.take(b"".join(events[at : at + size]))
        assert hearing.spoken() == whole
