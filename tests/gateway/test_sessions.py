"""The session format: what is read, what is stripped, and what is refused with file and line."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from ctxgate.gateway.sessions import Session, SessionError, parse_session, read_session

TOOL = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}
HEADER: dict[str, Any] = {"session": "s1", "source": "made up", "license": "MIT", "tools": [TOOL]}
SYSTEM = {"role": "system", "content": "You list."}
USER = {"role": "user", "content": "List it."}
CALL = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"path":"."}'}}
ASKS = {
    "role": "assistant",
    "content": None,
    "tool_calls": [CALL],
    "_recorded": {"time": "2025-12-08T23:41:09.389+01:00", "uncached": 5, "output": 2},
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "a b"}
DONE = {"role": "assistant", "content": "a and b"}
TRAJECTORIES = Path(__file__).parents[3] / "shared" / "trajectories"


def lines(*values: object) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


def session(*messages: object) -> Session:
    return parse_session(lines(HEADER, *messages), "s.jsonl")


def refusal(data: bytes) -> str:
    with pytest.raises(SessionError) as caught:
        parse_session(data, "dir/s.jsonl")
    return str(caught.value)


def test_a_request_is_all_that_stands_before_an_assistant_message() -> None:
    asks = {key: value for key, value in ASKS.items() if key != "_recorded"}
    first, second = session(SYSTEM, USER, ASKS, RESULT, DONE).turns()
    assert (first.session, first.number, first.of) == ("s1", 0, 2)
    assert first.messages == (SYSTEM, USER)
    assert first.answer == asks
    assert second.number == 1
    assert second.messages == (SYSTEM, USER, asks, RESULT)
    assert second.answer == DONE
    assert first.tools == second.tools == (TOOL,)


def test_messages_after_the_last_answer_make_no_request() -> None:
    read = session(USER, DONE, USER)
    assert read.requests == 1
    assert [turn.number for turn in read.turns()] == [0]


def test_the_recorded_time_is_kept_in_utc_and_never_sent() -> None:
    turn = next(session(SYSTEM, USER, ASKS, RESULT, DONE).turns())
    assert turn.at == datetime(2025, 12, 8, 22, 41, 9, 389000, tzinfo=UTC)
    assert "_recorded" not in turn.answer


def test_an_unrecorded_time_depends_on_the_turn_alone() -> None:
    at = [turn.at for turn in session(USER, DONE, USER, DONE).turns()]
    assert at == [datetime(2026, 1, 5, 9, 0, 0, tzinfo=UTC), datetime(2026, 1, 5, 9, 0, 47, tzinfo=UTC)]


def test_key_order_of_the_file_survives() -> None:
    first = next(
        parse_session(
            b'{"tools":[],"session":"s"}\n{"content":"x","role":"user"}\n' + lines(DONE), "s"
        ).turns()
    )
    assert list(first.messages[0]) == ["content", "role"]


def test_a_last_line_without_newline_is_read() -> None:
    assert parse_session(lines(HEADER, USER, DONE)[:-1], "s").requests == 1


CASES = [
    (b"", "dir/s.jsonl:1: the file is empty; line 1 must be the session's header"),
    (lines(USER, DONE), "dir/s.jsonl:1: line 1 is a message; it must be the session's header"),
    (
        lines({"tools": []}, USER, DONE),
        "dir/s.jsonl:1: header field `session` must be a printable, non-empty string",
    ),
    (
        lines({"session": "a\nb", "tools": []}, USER, DONE),
        "dir/s.jsonl:1: header field `session` must be a printable, non-empty string",
    ),
    (
        lines({"session": "s"}, USER),
        "dir/s.jsonl:1: header field `tools` must be an array, found null or nothing",
    ),
    (
        lines({"session": "s", "tools": [{"type": "function"}]}, USER),
        "dir/s.jsonl:1: `tools[0]` must be an object of type `function`",
    ),
    (
        lines({"session": "s", "tools": [{"type": "function", "function": {}}]}, USER),
        "dir/s.jsonl:1: `tools[0].function.name` must be a string",
    ),
    (lines(HEADER, USER), "dir/s.jsonl:2: the session has no assistant message, so no request"),
    (lines(HEADER, USER) + b"\n" + lines(DONE), "dir/s.jsonl:3: blank line; every line is one JSON object"),
    (lines(HEADER, [1]), "dir/s.jsonl:2: expected a JSON object, found an array"),
    (
        lines(HEADER, {"role": "robot", "content": ""}),
        "dir/s.jsonl:2: `role` must be one of assistant, developer, system, tool, user, found 'robot'",
    ),
    (lines(HEADER, DONE), "dir/s.jsonl:2: an assistant message needs at least one message before it"),
    (
        lines(HEADER, {"role": "user", "content": None}),
        "dir/s.jsonl:2: `content` must be a string or an array of parts, found null or nothing",
    ),
    (
        lines(HEADER, {"role": "user", "content": [{"text": "x"}]}),
        "dir/s.jsonl:2: `content[0]` must be an object with a `type`",
    ),
    (
        lines(HEADER, {**USER, "_recorded": {}}),
        "dir/s.jsonl:2: `_recorded` belongs to assistant messages only",
    ),
    (
        lines(HEADER, USER, {"role": "assistant", "content": None}),
        "dir/s.jsonl:3: `content` must be a string or an array of parts, found null or nothing",
    ),
    (
        lines(HEADER, USER, {"role": "assistant", "tool_calls": []}),
        "dir/s.jsonl:3: `tool_calls` must be a non-empty array",
    ),
    (
        lines(HEADER, USER, {"role": "assistant", "tool_calls": [{**CALL, "id": 3}]}),
        "dir/s.jsonl:3: `tool_calls[0].id` must be a string",
    ),
    (
        lines(HEADER, USER, {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f"}}]}),
        "dir/s.jsonl:3: `tool_calls[0].function.arguments` must be a string",
    ),
    (
        lines(HEADER, USER, {**DONE, "_recorded": {"time": "yesterday"}}),
        "dir/s.jsonl:3: `_recorded.time` must be an ISO 8601 time, found 'yesterday'",
    ),
    (
        lines(HEADER, USER, {**DONE, "_recorded": {"time": "2025-12-08T22:41:09"}}),
        "dir/s.jsonl:3: `_recorded.time` must name its zone",
    ),
    (
        lines(HEADER, USER, ASKS, {**RESULT, "tool_call_id": "c2"}, DONE),
        "dir/s.jsonl:4: `tool_call_id` 'c2' answers no earlier tool call",
    ),
]


@pytest.mark.parametrize(("data", "message"), CASES, ids=[f"{at}" for at, _ in enumerate(CASES)])
def test_a_broken_file_is_refused_with_file_and_line(data: bytes, message: str) -> None:
    assert refusal(data) == message


@pytest.mark.parametrize(
    "line", [b"{", b'{"role":"user"} x', b'{"a":"\xff"}', b'{"a":"\\ud800"}', b'{"a":NaN}']
)
def test_a_line_that_is_not_json_is_refused(line: bytes) -> None:
    assert refusal(lines(HEADER, USER) + line + b"\n" + lines(DONE)).startswith("dir/s.jsonl:3: not JSON: ")


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_session(tmp_path / "none.jsonl")


@pytest.mark.skipif(not TRAJECTORIES.is_dir(), reason="the recorded sessions lie outside the repository")
def test_every_recorded_session_is_read() -> None:
    requests = {path.stem: read_session(path).requests for path in TRAJECTORIES.glob("*.jsonl")}
    assert requests["coding-long-a"] == 468
    assert (requests["repair-a"], requests["repair-b"]) == (13, 11)
    airline = [count for name, count in requests.items() if name.startswith("airline-")]
    assert (len(airline), min(airline), max(airline)) == (24, 5, 30)
