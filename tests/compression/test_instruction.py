"""The call that continues a conversation, and the reading of what comes back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ctxgate.compression.instruction import (
    INSTRUCTION,
    PAUSE,
    refuses_tools,
    summary_call,
    warm_share,
)
from ctxgate.compression.instruction_answer import LONGEST_POINT, read_answer
from ctxgate.compression.scripts import script_of
from ctxgate.compression.summary import Summary, SummaryFault, listed
from ctxgate.inference import wire

LARGE = 10**6


def call(body: bytes, **options: Any) -> Any:
    settings: dict[str, Any] = {"model": "m", "output_tokens": 50, "refuse_tools": False} | options
    return json.loads(b"".join(summary_call(wire.parse(body), **settings)))


def test_the_messages_keep_their_bytes_and_the_last_of_repeated_members_counts() -> None:
    one, two = b'{"role": "user",  "content": "\\u0041"}', b'{"content":[ ],"role":"tool"}'
    body = b'{"messages": [], "model": "x", "messages": [ %s , %s ], "stream": true}' % (one, two)
    raw = b"".join(summary_call(wire.parse(body), model="m", output_tokens=5, refuse_tools=False))
    assert one + b"," + two + b',{"role":"assistant"' in raw
    assert [each["role"] for each in json.loads(raw)["messages"]] == ["user", "tool", "assistant", "user"]


def test_only_what_shapes_the_prompt_is_passed_on() -> None:
    shaping = {
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "chat_template": "t",
        "chat_template_kwargs": {"k": 1},
        "reasoning_effort": "low",
        "documents": [],
        "add_special_tokens": False,
        "cache_salt": "s",
    }
    others = {
        "n": 2,
        "logprobs": True,
        "top_logprobs": 3,
        "response_format": {"type": "json_object"},
        "stop": ["x"],
        "stream_options": {"include_usage": True},
        "seed": 1,
        "top_p": 0.1,
        "max_completion_tokens": 9,
        "tool_choice": "required",
        "user": "u",
        "priority": 3,
        "add_generation_prompt": False,
        "continue_final_message": True,
        "truncate_prompt_tokens": 5,
        "prompt_logprobs": 0,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "temperature": 2,
    }
    messages = [{"role": "user", "content": "x"}]
    body = json.dumps({"model": "theirs", "messages": messages, **shaping, **others}).encode()
    out = call(body, output_tokens=77)
    assert out.pop("messages")[:1] == messages
    assert out == {"model": "m", **shaping, "temperature": 0, "max_tokens": 77, "stream": False}


@pytest.mark.parametrize(
    ("last", "added"),
    [("user", ["assistant", "user"]), ("tool", ["assistant", "user"]), ("assistant", ["user"])],
)
def test_turns_alternate(last: str, added: list[str]) -> None:
    out = call(json.dumps({"messages": [{"role": last, "content": "x"}]}).encode())["messages"]
    assert [each["role"] for each in out[1:]] == added
    assert out[-1]["content"] == INSTRUCTION
    assert [each["content"] for each in out[1:-1]] == [PAUSE] * (len(added) - 1)


def test_tools_are_refused_only_where_there_are_any_and_the_salt_is_the_prompts_own() -> None:
    bare = b'{"messages":[{"role":"user","content":"x"}]}'
    tools = bare[:-1] + b',"tools":[{"type":"function"}],"cache_salt":"own"}'
    assert "tool_choice" not in call(bare, refuse_tools=True)
    assert call(tools, refuse_tools=True, cache_salt="other")["tool_choice"] == "none"
    assert call(tools, cache_salt="other")["cache_salt"] == "own"
    assert call(bare, cache_salt="other")["cache_salt"] == "other"
    assert refuses_tools(wire.parse(tools[:-1] + b',"tool_choice": "none"}'))
    assert not refuses_tools(wire.parse(tools[:-1] + b',"tool_choice": "auto"}'))
    assert not refuses_tools(wire.parse(tools))


USER: dict[str, str] = {"role": "user", "content": 'say "role": "user"'}
THINKS = {"role": "assistant", "reasoning": "r"}
TAGS = {"role": "assistant", "content": "</think>"}
CALLS = {"role": "assistant", "content": "x"}


@pytest.mark.parametrize(
    ("messages", "tools_move", "reasoning_goes", "first"),
    [
        ([USER, CALLS, CALLS], False, True, 3),
        ([THINKS, USER, CALLS], False, True, 3),
        ([USER, CALLS, THINKS, CALLS, TAGS], False, True, 2),
        ([USER, CALLS, TAGS], False, True, 2),
        ([USER, CALLS, TAGS], False, False, 3),
        ([CALLS, USER, CALLS, TAGS], True, False, 1),
        ([CALLS, USER, CALLS, TAGS], True, True, 1),
        ([CALLS, TAGS], True, False, 2),
    ],
)
def test_what_a_user_turn_may_change_in_a_prompt(
    messages: list[dict[str, str]], tools_move: bool, reasoning_goes: bool, first: int
) -> None:
    sent = wire.parse(json.dumps({"messages": messages, "tools": [{}]}).encode())
    sizes = [len(json.dumps(message)) for message in messages]
    share = warm_share(sent, tools_move=tools_move, reasoning_goes=reasoning_goes)
    assert share == sum(sizes[:first]) / sum(sizes)
    bare = wire.parse(json.dumps({"messages": messages}).encode())
    assert warm_share(bare, tools_move=True, reasoning_goes=False) == 1


EXPECTED = Summary(
    goal=("port the parser",),
    decisions=("dates are UTC because tests say so",),
    state=("40 tests pass", "the cache is gone"),
    files=("src/a.rs",),
)
FORMS = {
    "as asked": (
        "Goal:\n- port the parser\nDecisions:\n- dates are UTC because tests say so\n"
        "State:\n- 40 tests pass\n- the cache is gone\nFiles touched:\n- src/a.rs"
    ),
    "markdown": (
        "Here are my notes:\n\n## Goal\n\nport the parser\n\n## Decisions\n* dates are UTC\n  because tests"
        " say so\n\n### State\n1. 40 tests pass\n2. the cache is gone\n\n## Files Touched\n- src/a.rs\n"
    ),
    "bold": (
        "**Goal:** port the parser\n**Key decisions**\n- dates are UTC because tests say so\n"
        "- **Current state**:\n- 40 tests pass\n- the cache is gone\n**Open items:** none\n"
        "**Files**: src/a.rs"
    ),
    "fenced": (
        "```markdown\n1. Goal: port the parser\n2. Decisions:\n   - dates are UTC because tests say so\n"
        "3. Status: 40 tests pass\n   - the cache is gone\n4. Files touched:\n   - [x] src/a.rs\n```"
    ),
    "json": json.dumps(
        {
            "goal": "port the parser",
            "decisions": ["dates are UTC because tests say so"],
            "state": ["40 tests pass", "the cache is gone"],
            "Open items": [],
            "files_touched": ["src/a.rs"],
            "mood": "good",
        }
    ),
    "thought": (
        "<think>Goal:\n- no</think>\nGoal:\n- port the parser\nDecisions:\n"
        "- dates are UTC because tests say so\nState:\n- 40 tests pass\n- the cache is gone\n"
        "Files touched:\n- src/a.rs"
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_notes_are_read_however_they_are_set(form: str) -> None:
    reading = read_answer(FORMS[form], LARGE)
    assert (reading.fault, reading.summary) == (None, EXPECTED)


def test_notes_without_headings_are_state() -> None:
    text = "We ported the parser.\nState of the art is not a heading.\n- All tests pass."
    reading = read_answer(text, LARGE)
    assert reading.summary == Summary(
        state=("We ported the parser.", "State of the art is not a heading.", "All tests pass.")
    )


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("State:\n- all tests pass\n- the tax mod", ("all tests pass",)),
        (
            "State:\n- all tests pass\n- the tax module is done.",
            ("all tests pass", "the tax module is done."),
        ),
        ("State:\n- The parser is ported. The tax mod", ("The parser is ported.",)),
    ],
)
def test_a_point_that_was_cut_off_goes(text: str, state: tuple[str, ...]) -> None:
    reading = read_answer(text, LARGE, cut=True)
    assert reading.summary == Summary(state=state)


@pytest.mark.parametrize(
    ("text", "cut", "fault"),
    [
        ("", False, SummaryFault.EMPTY),
        ("Goal:\nState:\n- none\nOpen items: n/a", False, SummaryFault.EMPTY),
        ("State:\n- it was about to sa", True, SummaryFault.EMPTY),
        ("<think>State:\n- a long thought that never ended", True, SummaryFault.EMPTY),
        ("Goal:\n- run <tool_call> for me and everybody", False, SummaryFault.TOOL_CALL),
        ('{"tool_calls": [], "goal": "a goal that is long enough"}', False, SummaryFault.TOOL_CALL),
    ],
)
def test_what_must_not_be_used(text: str, cut: bool, fault: SummaryFault) -> None:
    reading = read_answer(text, LARGE, cut=cut)
    assert (reading.summary, reading.fault) == (None, fault)


def test_longer_than_the_source() -> None:
    text = "Goal:\n- port the parser"
    assert read_answer(text, 100).fault is SummaryFault.LONGER
    assert read_answer(text, 1000).fault is None


def test_points_are_single_lines_of_bounded_length() -> None:
    reading = read_answer("State:\n- " + "word \u3042" * 2000 + "\n- b\u2028c\r\nGoal: \udc00 half", LARGE)
    assert reading.summary is not None
    assert all(len(point.encode()) <= LONGEST_POINT for point in reading.summary.state)
    lines = listed(reading.summary).splitlines()
    assert lines[0] == "Goal:"
    assert lines[1] == "- \ufffd half"
    assert lines[2] == "State:"
    assert lines[4:] == ["- b c"]


@pytest.mark.parametrize(
    "unit", ["**", "# ", "- ", "1. ", "Goal: ", "<think>", "  ", "a ", "{", "```\n", ":\n"]
)
def test_hostile_answers_cost_no_more_than_their_length(unit: str) -> None:
    text = unit * (40_000 // len(unit))
    reading = read_answer(text, LARGE)
    assert (reading.summary is None) is (reading.fault is not None)


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("The parser reads dates as UTC and everything passes.", "latin"),
        ("Der Gr\u00f6\u00dfenvergleich l\u00e4uft \u00fcber alle Dateien und meldet nichts.", "latin"),
        ("\u041f\u0430\u0440\u0441\u0435\u0440 \u0447\u0438\u0442\u0430\u0435\u0442 " * 4, "cyrillic"),
        ("\u8bf7\u6c42\u5df2\u7ecf\u5b8c\u6210" * 10, "han"),
        ("\u8acb\u6c42\u66f8\u306e\u8aad\u307f\u53d6\u308a\u3092\u79fb\u690d" * 8, "kana"),
        ("\uacc4\uc0b0\uc11c" * 20, "hangul"),
        ("\u0627\u0644\u0641\u0648\u0627\u062a\u064a\u0631 " * 8, "arabic"),
        ("12345 67890 ... ---- !!!!", None),
        ("short", None),
    ],
)
def test_the_script_of_a_text(text: str, script: str | None) -> None:
    assert script_of(text) == script
