"""Each perturbation changes what it says and nothing else, and does so reproducibly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxgate.gateway.perturb import LATE_TOOL_NAME, Perturbation, parse_perturbations, perturb
from ctxgate.gateway.sessions import Message, Turn

TOOLS = tuple(
    {
        "type": "function",
        "function": {
            "name": f"tool_{n}",
            "description": "Does it.",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "depth": {"type": "integer"},
                    "all": {"type": "boolean"},
                },
                "required": ["path", "depth"],
            },
        },
    }
    for n in range(6)
)
ARGUMENTS = (
    '{"path": "a b", "depth": 2, "filter": {"size": 1.50, "name": "x, y: {z}"}, "rows": [{"k": 1, "j": []}]}'
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=6),
    max_leaves=20,
)


def call(arguments: str) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "tool_0", "arguments": arguments}}


def turn(number: int = 0, *, arguments: str = ARGUMENTS, of: int = 8) -> Turn:
    messages: tuple[Message, ...] = (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": None, "tool_calls": [call(arguments), call(arguments)]},
        {"role": "tool", "tool_call_id": "c", "content": ""},
        {"role": "assistant", "content": "Text stays.", "tool_calls": [call(arguments)]},
        {"role": "tool", "tool_call_id": "c", "content": "found"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "More."},
    )
    at = datetime(2026, 2, 3, 4, 5, 6 + number, tzinfo=UTC)
    return Turn("s", number, of, at, messages, TOOLS, {"role": "assistant", "content": "ok"})


def arguments_of(changed: Turn) -> list[str]:
    return [
        each["function"]["arguments"]
        for message in changed.messages
        for each in message.get("tool_calls") or ()
    ]


def without_arguments(changed: Turn) -> Turn:
    blank = tuple(
        {**m, "tool_calls": [call("") for _ in m["tool_calls"]]} if m.get("tool_calls") else m
        for m in changed.messages
    )
    return replace(changed, messages=blank)


def test_no_perturbation_is_the_turn_itself() -> None:
    assert perturb(turn(), ()) == turn()


def test_clock_is_the_last_line_of_the_system_prompt_and_tells_the_requests_time() -> None:
    changed = perturb(turn(1), {Perturbation.CLOCK})
    assert changed.messages[0]["content"] == "Be brief.\nCurrent time: 2026-02-03T04:05:07Z"
    assert replace(changed, messages=turn(1).messages) == turn(1)
    assert changed.messages[1:] == turn(1).messages[1:]


def test_clock_makes_a_system_prompt_where_there_is_none() -> None:
    plain = replace(turn(), messages=turn().messages[1:])
    changed = perturb(plain, {Perturbation.CLOCK})
    assert changed.messages[0] == {"role": "system", "content": "Current time: 2026-02-03T04:05:06Z"}
    assert changed.messages[1:] == plain.messages


def test_clock_joins_content_parts() -> None:
    head: Message = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    changed = perturb(replace(turn(), messages=(head, *turn().messages[1:])), {Perturbation.CLOCK})
    assert changed.messages[0]["content"] == [
        {"type": "text", "text": "Be brief."},
        {"type": "text", "text": "Current time: 2026-02-03T04:05:06Z"},
    ]
    assert len(head["content"]) == 1


def test_tool_order_moves_tools_and_nothing_else() -> None:
    changed = [perturb(turn(number), {Perturbation.TOOL_ORDER}) for number in range(8)]
    names = [tuple(tool["function"]["name"] for tool in each.tools) for each in changed]
    assert all(sorted(order) == [f"tool_{n}" for n in range(6)] for order in names)
    assert len(set(names)) > 4
    for number, each in enumerate(changed):
        assert {json.dumps(tool) for tool in each.tools} == {json.dumps(tool) for tool in TOOLS}
        assert replace(each, tools=TOOLS) == turn(number)


def test_json_keys_reorders_schemas_and_arguments_of_equal_value() -> None:
    changed = [perturb(turn(number), {Perturbation.JSON_KEYS}) for number in range(8)]
    for number, each in enumerate(changed):
        assert each.tools == TOOLS  # dicts compare without order
        assert [json.loads(text) for text in arguments_of(each)] == [json.loads(ARGUMENTS)] * 3
        assert without_arguments(each) == without_arguments(turn(number))
    assert len({json.dumps(each.tools) for each in changed}) == 8
    assert len({arguments_of(each)[0] for each in changed}) > 4
    wrappers = {
        tuple(tool["function"]["parameters"]["properties"]) for each in changed for tool in each.tools
    }
    assert len(wrappers) == 6  # 48 draws meet all orders of three keys


def test_json_keys_keeps_the_white_space_style() -> None:
    compact = json.dumps(json.loads(ARGUMENTS), separators=(",", ":"))
    changed = perturb(turn(arguments=compact), {Perturbation.JSON_KEYS})
    assert {len(text) for text in arguments_of(changed)} == {len(compact)}


@pytest.mark.parametrize(
    "text", ["", "{", "not json", '{"a": 1, "b": 2, "a": 3}', '{"b": NaN, "a": 1}', '{"b": 1e999, "a": 1}']
)
def test_json_keys_leaves_alone_what_json_cannot_carry_over(text: str) -> None:
    for number in range(4):
        assert arguments_of(perturb(turn(number, arguments=text), {Perturbation.JSON_KEYS})) == [text] * 3


def test_reserialize_changes_white_space_but_neither_lexemes_nor_key_order() -> None:
    forms = set()
    for number in range(12):
        changed = perturb(turn(number), {Perturbation.RESERIALIZE})
        for text in arguments_of(changed):
            forms.add(text)
            assert json.loads(text, object_pairs_hook=list) == json.loads(ARGUMENTS, object_pairs_hook=list)
            assert "1.50" in text
            assert '"x, y: {z}"' in text
            assert "[]" in text
        assert changed.tools == TOOLS
    assert forms >= {
        ARGUMENTS,
        '{"path":"a b","depth":2,"filter":{"size":1.50,"name":"x, y: {z}"},"rows":[{"k":1,"j":[]}]}',
    }
    assert len(forms) == 4


def test_reserialize_swaps_the_forms_of_absent_text_beside_tool_calls_only() -> None:
    forms = set()
    for number in range(12):
        original, changed = turn(number), perturb(turn(number), {Perturbation.RESERIALIZE})
        forms.add(json.dumps(changed.messages[2].get("content", "missing")))
        assert changed.messages[4]["content"] == "Text stays."
        for at in (0, 1, 3, 5, 6, 7):
            assert changed.messages[at] == original.messages[at]
    assert forms == {"null", '""', '"missing"'}


@pytest.mark.parametrize("text", ["", "{", "tool said {no}", '{"a": "unclosed}'])
def test_reserialize_leaves_alone_what_is_not_json(text: str) -> None:
    assert arguments_of(perturb(turn(arguments=text), {Perturbation.RESERIALIZE})) == [text] * 3


def test_late_tool_joins_at_the_middle_and_stays() -> None:
    counts = [len(perturb(turn(number, of=5), {Perturbation.LATE_TOOL}).tools) for number in range(5)]
    assert counts == [6, 6, 6, 7, 7]
    late = [perturb(turn(number, of=5), {Perturbation.LATE_TOOL}).tools for number in (3, 4)]
    assert late[0][:6] == late[1][:6] == TOOLS
    assert late[0][6] == late[1][6]
    assert late[0][6]["function"]["name"] == LATE_TOOL_NAME


def test_late_tool_never_doubles_a_name() -> None:
    first = perturb(turn(7), {Perturbation.LATE_TOOL})
    second = perturb(first, {Perturbation.LATE_TOOL})
    names = [tool["function"]["name"] for tool in second.tools]
    assert len(names) == len(set(names)) == 8


@given(JSON, st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " :\t")]), st.integers(0, 1000))
def test_any_arguments_keep_their_value(value: Any, separators: tuple[str, str], number: int) -> None:
    text = json.dumps(value, separators=separators)
    original = replace(turn(arguments=text), number=number)
    for kinds in ({Perturbation.JSON_KEYS}, {Perturbation.RESERIALIZE}, set(Perturbation)):
        assert [json.loads(each) for each in arguments_of(perturb(original, kinds))] == [json.loads(text)] * 3


def test_all_combined_do_what_each_does_alone() -> None:
    changed = perturb(turn(6), set(Perturbation))
    assert sorted(tool["function"]["name"] for tool in changed.tools) == [
        LATE_TOOL_NAME,
        *(f"tool_{n}" for n in range(6)),
    ]
    assert changed.messages[0] == {
        "role": "system",
        "content": "Be brief.\nCurrent time: 2026-02-03T04:05:12Z",
    }
    assert [json.loads(text) for text in arguments_of(changed)] == [json.loads(ARGUMENTS)] * 3
    assert changed.answer == turn(6).answer


def test_the_original_is_not_touched() -> None:
    original = turn(6)
    before = json.dumps(original.messages), json.dumps(original.tools)
    perturb(original, set(Perturbation))
    assert (json.dumps(original.messages), json.dumps(original.tools)) == before


def test_sessions_and_turns_draw_differently() -> None:
    sent = {
        json.dumps(perturb(replace(turn(), session=name, number=number), {Perturbation.TOOL_ORDER}).tools)
        for name in ("s", "t", "u")
        for number in range(3)
    }
    assert len(sent) > 6  # nine draws out of 720 orders


SCRIPT = """
import json
from datetime import UTC, datetime
from ctxgate.gateway.perturb import Perturbation, perturb
from ctxgate.gateway.sessions import Turn
functions = ({"name": c, "description": c, "parameters": {}} for c in "abcde")
tools = tuple({"type": "function", "function": function} for function in functions)
call = {"id": "c", "type": "function", "function": {"name": "a", "arguments": '{"x": 1, "y": 2, "z": 3}'}}
asks = {"role": "assistant", "content": None, "tool_calls": [call]}
turn = Turn("s", 3, 4, datetime(2026, 1, 1, tzinfo=UTC), ({"role": "user", "content": "u"}, asks), tools, {})
changed = perturb(turn, set(Perturbation))
print(json.dumps([changed.messages, changed.tools]))
"""


@pytest.mark.integration
def test_bytes_are_the_same_in_every_process() -> None:
    sent = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert sent[0] == sent[1]
    assert LATE_TOOL_NAME in sent[0]


def test_names_are_parsed() -> None:
    assert parse_perturbations("clock, tool-order") == {Perturbation.CLOCK, Perturbation.TOOL_ORDER}
    assert parse_perturbations("") == frozenset()
    with pytest.raises(
        ValueError, match=r"'clocks'; known: clock, json-keys, late-tool, reserialize, tool-order"
    ):
        parse_perturbations("clocks")
