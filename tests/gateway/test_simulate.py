"""`ctxgate simulate`: shapes of recorded sessions, tables, and what it refuses."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.gateway.cli import main
from ctxgate.gateway.sessions import parse_session
from ctxgate.gateway.simulate_sessions import kind_of, shape_of
from ctxgate.routing.simulated_load import Call

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ctxgate.gateway.sessions import Session


def session(*messages: dict[str, Any]) -> Session:
    header = {"session": "s", "tools": []}
    return parse_session(b"\n".join(json.dumps(line).encode() for line in (header, *messages)), "s")


def answered(content: str, **recorded: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content} | ({"_recorded": recorded} if recorded else {})


def letters(messages: Sequence[Mapping[str, Any]], _tools: object) -> list[int]:
    """One token per character, and one that ends each message."""
    return [token for message in messages for token in (*map(ord, message["content"]), 0)]


SYSTEM = {"role": "system", "content": "s" * 9}


def test_a_shape_has_the_lengths_of_its_prompts_and_the_pauses_between_them() -> None:
    found = shape_of(
        session(
            SYSTEM,
            {"role": "user", "content": "u" * 4},
            answered("a" * 3, time="2026-01-01T00:00:00Z", output=7),
            {"role": "user", "content": "u"},
            answered("b", time="2026-01-01T00:00:30Z", output=80),
            {"role": "user", "content": "u"},
            answered("c", time="2026-01-01T00:00:30.1Z", output=80),
        ),
        "k",
        letters,
    )
    # 30 s less 80 tokens of 12.5 ms; a tenth of a second is less than the last answer took.
    assert found.calls == (Call(15, 7, 0.0), Call(21, 80, 29.0), Call(25, 80, 0.1))
    assert (found.kind, found.head_tokens) == ("k", 10)


def test_without_times_a_tool_takes_two_seconds_and_a_person_twenty() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    found = shape_of(
        session(
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": "xy", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "t"},
            answered("z"),
            {"role": "user", "content": "u"},
            answered("z"),
        ),
        "k",
        letters,
    )
    assert [call.think_s for call in found.calls] == [0.0, 2.0, 20.0]
    assert [call.output_tokens for call in found.calls] == [3, 2, 2]
    assert (found.head, found.head_tokens) == (None, 0)


def test_sessions_of_the_same_head_share_it_and_others_do_not() -> None:
    def head(text: str) -> str | None:
        system = {"role": "system", "content": text}
        return shape_of(session(system, {"role": "user", "content": "u"}, answered("a")), "k", letters).head

    assert head("same") == head("same") != head("other")


def test_a_session_that_mostly_follows_tools_is_an_agents() -> None:
    user, tool = {"role": "user", "content": "u"}, {"role": "tool", "tool_call_id": "c", "content": "t"}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    step = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert kind_of(session(user, step, tool, step, tool, step, tool, step, tool, answered("a"))) == "agent"
    assert kind_of(session(user, step, tool, answered("a"), user, answered("a"))) == "interactive"


def test_the_command_prints_one_row_per_policy(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", "--mixes", "hot-prefix", "--loads", "0.2", "--seconds", "4", "--policies"]
    assert main([*arguments, "ctxgate,lmetric", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["mix"], row["load"], row["policy"]) for row in rows] == [
        ("hot-prefix", 0.2, "ctxgate"),
        ("hot-prefix", 0.2, "lmetric"),
    ]
    assert rows[0]["requests"] == rows[1]["requests"] > 0
    assert rows[0]["refused"] == 0
    assert main([*arguments, "random"]) == 0
    assert "hot-prefix, load 0.2" in capsys.readouterr().out


def test_sessions_are_read_and_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "s.jsonl"
    lines = [{"session": "s", "tools": []}, SYSTEM, {"role": "user", "content": "hello"}, answered("there")]
    file.write_text("\n".join(map(json.dumps, lines)))
    arguments = ["simulate", "--sessions", str(file), "--loads", ".01", "--seconds", "1", "--json"]
    assert main([*arguments, "--policies", "ctxgate"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["mix"] == "sessions"
    assert row["requests"] > 0
    file.write_text("{}")
    assert main(arguments) == 2
    assert f"{file}:1:" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--mixes", "calm"],
        ["--policies", "ctxgate,newest"],
        ["--loads", "0"],
        ["--loads", "much"],
        ["--seconds", "-1"],
    ],
)
def test_unusable_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *arguments])
    assert ended.value.code == 2
    assert arguments[1].split(",")[-1] in capsys.readouterr().err


def test_sessions_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate"]) == 2
    assert "--sessions" in capsys.readouterr().err
