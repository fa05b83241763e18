"""Recorded agent sessions: the JSONL format, read strictly, and the requests they stand for.

Line 1 of a file is a header (`session`, `tools`, and free metadata such as `source` or `license`);
every further line is one OpenAI chat message. An assistant message may carry `_recorded`, what the
original provider measured; it is kept beside the message and never sent. A session stands for one
request per assistant message: its prompt is every message before it, and the recorded answer joins
the history whatever the backend says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, TypeGuard

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Message = Mapping[str, Any]
Tool = Mapping[str, Any]

ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool"})
# Sessions without recorded times are dated from here on, so that a replay is the same at any hour.
UNDATED_START: Final = datetime(2026, 1, 5, 9, 0, tzinfo=UTC)
UNDATED_STEP: Final = timedelta(seconds=47)


class SessionError(ValueError):
    """A session file that breaks the format; the text starts with `FILE:LINE:`."""

    def __init__(self, source: str, line: int, problem: str) -> None:
        super().__init__(f"{source}:{line}: {problem}")
        self.source = source
        self.line = line
        self.problem = problem


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session: the prompt, and the answer that joins the history after it.

    `number` counts from 0 to `of` - 1. `at` is when the request was made, in UTC: the recorded time,
    else a made-up one that only depends on `number`.
    """

    session: str
    number: int
    of: int
    at: datetime
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    answer: Message


@dataclass(frozen=True, slots=True)
class Session:
    """A whole recorded conversation.

    `times` and `outputs` (tokens) hold one entry per assistant message, None if unrecorded.
    """

    name: str
    tools: tuple[Tool, ...]
    messages: tuple[Message, ...]
    times: tuple[datetime | None, ...] = ()
    outputs: tuple[int | None, ...] = ()

    @property
    def requests(self) -> int:
        """How many requests the session stands for."""
        return sum(message["role"] == "assistant" for message in self.messages)

    def turns(self) -> Iterator[Turn]:
        """The session's requests in order, one per assistant message."""
        answers = [at for at, message in enumerate(self.messages) if message["role"] == "assistant"]
        for number, at in enumerate(answers):
            recorded = self.times[number] if number < len(self.times) else None
            yield Turn(
                session=self.name,
                number=number,
                of=len(answers),
                at=recorded or UNDATED_START + number * UNDATED_STEP,
                messages=self.messages[:at],
                tools=self.tools,
                answer=self.messages[at],
            )


def read_session(path: Path) -> Session:
    """Read one session file. Raises `SessionError` with file and line, or OSError."""
    return parse_session(path.read_bytes(), str(path))


def parse_session(data: bytes, source: str) -> Session:
    """Parse the bytes of a session file; `source` names it in errors."""
    lines = data.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    if not lines:
        raise SessionError(source, 1, "the file is empty; line 1 must be the session's header")
    name, tools = _header(_object(lines[0], source, 1), source)
    reader = _Reader(source)
    for number, line in enumerate(lines[1:], start=2):
        reader.add(_object(line, source, number), number)
    if not reader.times:
        raise SessionError(source, len(lines), "the session has no assistant message, so no request")
    return Session(name, tools, tuple(reader.messages), tuple(reader.times), tuple(reader.outputs))


def _object(line: bytes, source: str, number: int) -> dict[str, Any]:
    if not line.strip():
        raise SessionError(source, number, "blank line; every line is one JSON object")
    try:
        value = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise SessionError(source, number, f"not JSON: {error}") from None
    except RecursionError:
        raise SessionError(source, number, "nested too deeply") from None
    if not isinstance(value, dict):
        raise SessionError(source, number, f"expected a JSON object, found {_kind(value)}")
    return value


def _header(header: dict[str, Any], source: str) -> tuple[str, tuple[Tool, ...]]:
    if "role" in header:
        raise SessionError(source, 1, "line 1 is a message; it must be the session's header")
    name = header.get("session")
    if not _is_text(name) or not name.strip() or not name.isprintable():
        raise SessionError(source, 1, "header field `session` must be a printable, non-empty string")
    tools = header.get("tools")
    if not isinstance(tools, list):
        raise SessionError(source, 1, f"header field `tools` must be an array, found {_kind(tools)}")
    for at, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function":
            raise SessionError(source, 1, f"`tools[{at}]` must be an object of type `function`")
        if not _is_text(function.get("name")):
            raise SessionError(source, 1, f"`tools[{at}].function.name` must be a string")
    return name, tuple(tools)


class _Reader:
    """Checks messages one by one, in order, and strips what was recorded about them."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._calls: set[str] = set()
        self.messages: list[Message] = []
        self.times: list[datetime | None] = []
        self.outputs: list[int | None] = []

    def add(self, message: dict[str, Any], line: int) -> None:
        role = message.get("role")
        if role not in ROLES:
            raise self._error(line, f"`role` must be one of {', '.join(sorted(ROLES))}, found {role!r}")
        recorded = message.pop("_recorded", None)
        if role == "assistant":
            self._assistant(message, recorded, line)
        elif recorded is not None:
            raise self._error(line, "`_recorded` belongs to assistant messages only")
        else:
            self._content(message, line)
        if role == "tool":
            self._answered(message, line)
        self.messages.append(message)

    def _assistant(self, message: dict[str, Any], recorded: object, line: int) -> None:
        if not self.messages:
            raise self._error(line, "an assistant message needs at least one message before it")
        calls = message.get("tool_calls")
        if calls is not None:
            self._open(calls, line)
        if calls is None or message.get("content") is not None:
            self._content(message, line)
        self.times.append(self._time(recorded, line))
        self.outputs.append(self._output(recorded, line))

    def _open(self, calls: object, line: int) -> None:
        if not isinstance(calls, list) or not calls:
            raise self._error(line, "`tool_calls` must be a non-empty array")
        for at, call in enumerate(calls):
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(function, dict) or call.get("type") != "function":
                raise self._error(line, f"`tool_calls[{at}]` must be an object of type `function`")
            if not _is_text(call.get("id")):
                raise self._error(line, f"`tool_calls[{at}].id` must be a string")
            for field in ("name", "arguments"):
                if not _is_text(function.get(field)):
                    raise self._error(line, f"`tool_calls[{at}].function.{field}` must be a string")
            self._calls.add(call["id"])

    def _answered(self, message: dict[str, Any], line: int) -> None:
        call = message.get("tool_call_id")
        if not _is_text(call):
            raise self._error(line, "`tool_call_id` must be a string")
        if call not in self._calls:
            raise self._error(line, f"`tool_call_id` {call!r} answers no earlier tool call")

    def _content(self, message: dict[str, Any], line: int) -> None:
        content = message.get("content")
        parts = content if isinstance(content, list) else ()
        if not _is_text(content) and not parts:
            wanted = "a string or an array of parts"
            raise self._error(line, f"`content` must be {wanted}, found {_kind(content)}")
        for at, part in enumerate(parts):
            if not isinstance(part, dict) or not _is_text(part.get("type")):
                raise self._error(line, f"`content[{at}]` must be an object with a `type`")

    def _time(self, recorded: object, line: int) -> datetime | None:
        if recorded is None:
            return None
        if not isinstance(recorded, dict):
            raise self._error(line, f"`_recorded` must be an object, found {_kind(recorded)}")
        time = recorded.get("time")
        if time is None:
            return None
        try:
            stamp = datetime.fromisoformat(time)
        except (TypeError, ValueError):
            raise self._error(line, f"`_recorded.time` must be an ISO 8601 time, found {time!r}") from None
        if stamp.tzinfo is None:
            raise self._error(line, "`_recorded.time` must name its zone")
        return stamp.astimezone(UTC)

    def _output(self, recorded: object, line: int) -> int | None:
        output = recorded.get("output") if isinstance(recorded, dict) else None
        if output is not None and (type(output) is not int or output < 0):
            raise self._error(line, f"`_recorded.output` must be a number of tokens, found {output!r}")
        return output

    def _error(self, line: int, problem: str) -> SessionError:
        return SessionError(self._source, line, problem)


def _is_text(value: object) -> TypeGuard[str]:
    return isinstance(value, str)


def _kind(value: object) -> str:
    if value is None:
        return "null or nothing"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string"}
    names |= {list: "an array", dict: "an object"}
    return names[type(value)]
