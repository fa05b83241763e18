"""An agent with real tools on a tree of source files: list, read, grep, run.

The loop is the usual one: the model asks for tool calls, the tools run, their results join the
conversation. Only the model is scripted (`demo_script`), so that two runs send the same prompts. The
tools read below one folder and nothing else; `run_python` runs the script's own code in a fresh
interpreter.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ctxgate.gateway.sessions import Session

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from ctxgate.gateway.sessions import Message, Tool

_LONGEST_RESULT: Final = 4000  # characters
_RUN_TIMEOUT_S: Final = 60


@dataclass(frozen=True, slots=True)
class Ask:
    """The user says something."""

    text: str


@dataclass(frozen=True, slots=True)
class Act:
    """The model thinks aloud and calls tools; the script gets their results back."""

    thought: str
    calls: Sequence[tuple[str, Mapping[str, Any]]]


@dataclass(frozen=True, slots=True)
class Say:
    """The model answers the user."""

    text: str


Step: TypeAlias = Ask | Act | Say
Script: TypeAlias = "Generator[Step, list[str], None]"


def _tool(name: str, description: str, **parameters: str) -> Tool:
    properties = {
        key: {"type": kind, "description": text}
        for key, (kind, text) in ((key, value.split(": ", 1)) for key, value in parameters.items())
    }
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS: Final = (
    _tool(
        "list_files",
        "List a folder: one entry per line with its size in bytes.",
        path="string: Folder, '.' is the root",
    ),
    _tool(
        "read_file",
        "Read lines of a text file.",
        path="string: File, relative to the root",
        first="integer: First line, counted from 1",
        count="integer: How many lines",
    ),
    _tool(
        "grep",
        "Find lines that match a regular expression in the Python files below a folder.",
        pattern="string: Python regular expression",
        path="string: Folder or file, relative to the root",
    ),
    _tool("run_python", "Run a Python program and return what it prints.", code="string: The program"),
)


class Toolbox:
    """The tools, at work below `root`. Results are text; a failed call is a result, too."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._tools: dict[str, Callable[..., str]] = {
            "list_files": self._list,
            "read_file": self._read,
            "grep": self._grep,
            "run_python": self._run,
        }

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Run one tool and return its result, cut to a bounded length."""
        try:
            result = self._tools[name](**arguments)
        except OSError as error:
            result = f"error: {error.strerror}"  # the full text would name this machine's folders
        except (ValueError, subprocess.TimeoutExpired) as error:
            result = f"error: {error}"
        if len(result) <= _LONGEST_RESULT:
            return result
        return f"{result[:_LONGEST_RESULT]}\n[{len(result) - _LONGEST_RESULT} more characters]"

    def _path(self, path: str) -> Path:
        parts = Path(path).parts
        if Path(path).is_absolute() or ".." in parts:
            raise ValueError(f"{path} lies outside the tree")
        return self._root.joinpath(path)

    def _list(self, path: str) -> str:
        entries = sorted(self._path(path).iterdir())
        shown = (entry for entry in entries if not entry.name.startswith((".", "__pycache__")))
        return "\n".join(
            f"{entry.name}/" if entry.is_dir() else f"{entry.name} {entry.stat().st_size}" for entry in shown
        )

    def _read(self, path: str, first: int, count: int) -> str:
        lines = self._path(path).read_text(encoding="utf-8").splitlines()
        chosen = lines[first - 1 : first - 1 + count]
        rest = len(lines) - (first - 1 + len(chosen))
        return "\n".join((*chosen, f"[{rest} more lines]")) if rest > 0 else "\n".join(chosen)

    def _grep(self, pattern: str, path: str) -> str:
        wanted, start = re.compile(pattern), self._path(path)
        files = [start] if start.is_file() else python_files(start)
        found = [
            f"{file.relative_to(self._root).as_posix()}:{number}:{line}"
            for file in files
            for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
            if wanted.search(line)
        ]
        return "\n".join(found) or "no match"

    def _run(self, code: str) -> str:
        # -P keeps the working folder off sys.path: its names may shadow the standard library's.
        done = subprocess.run(
            [sys.executable, "-P", "-c", code],
            capture_output=True,
            text=True,
            check=False,
            timeout=_RUN_TIMEOUT_S,
            cwd=self._root,
        )
        return done.stdout if done.returncode == 0 else f"exit code {done.returncode}\n{done.stderr}"


def python_files(folder: Path) -> list[Path]:
    """All Python files below a folder, sorted; links to folders are followed, unlike `rglob` does."""
    found = [
        Path(parent, name)
        for parent, _, names in os.walk(folder, followlinks=True)
        for name in names
        if name.endswith(".py")
    ]
    return sorted(found)


def work(
    name: str, system: str, script: Script, toolbox: Toolbox, turns: int, watch: Callable[[str], None]
) -> Session:
    """Let the agent work for at most `turns` model answers and return the conversation as a session.

    `watch` is told what the agent does, one line per tool call.
    """
    messages: list[Message] = [{"role": "system", "content": system}]
    answers, results, started = 0, list[str](), False
    while answers < turns:
        try:
            step = script.send(results) if started else next(script)
        except StopIteration:
            break
        started, results = True, []
        match step:
            case Ask(text):
                messages.append({"role": "user", "content": text})
                continue
            case Say(text):
                messages.append({"role": "assistant", "content": text})
            case Act(thought, calls):
                results = _act(messages, thought, calls, toolbox, answers, watch)
        answers += 1
    script.close()
    return Session(name=name, tools=TOOLS, messages=tuple(messages))


def _act(
    messages: list[Message],
    thought: str,
    calls: Sequence[tuple[str, Mapping[str, Any]]],
    toolbox: Toolbox,
    number: int,
    watch: Callable[[str], None],
) -> list[str]:
    """Add one round to the conversation: the calls, then each one's result."""
    ids = [f"call_{number:03d}_{at}" for at in range(len(calls))]
    wire = [
        {"id": each, "type": "function", "function": {"name": name, "arguments": json.dumps(dict(arguments))}}
        for each, (name, arguments) in zip(ids, calls, strict=True)
    ]
    messages.append({"role": "assistant", "content": thought, "tool_calls": wire})
    results = []
    for each, (name, arguments) in zip(ids, calls, strict=True):
        result = toolbox.call(name, arguments)
        watch(f"{name} {_brief(arguments)} -> {len(result):,} characters")
        messages.append({"role": "tool", "tool_call_id": each, "content": result})
        results.append(result)
    return results


def _brief(arguments: Mapping[str, Any]) -> str:
    text = " ".join(str(value).strip().splitlines()[0] for value in arguments.values())
    return text if len(text) <= 60 else text[:57] + "..."
