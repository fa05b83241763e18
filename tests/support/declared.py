"""Conversations with a clock in the head, for tests of the level `declared`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ctxgate.compression.moved import HEADING, PLACEHOLDER
from ctxgate.compression.policy import Level, Policy
from ctxgate.compression.volatile import VolatileKind

if TYPE_CHECKING:
    from support.forms import Process

CLOCK = Policy(Level.DECLARED, kinds=frozenset({VolatileKind.CLOCK}))
MARKED = Policy(Level.DECLARED)
STABLE = {"ctxgate": {"stability": "stable"}}
VOLATILE = {"ctxgate": {"stability": "volatile"}}
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}

Document = dict[str, Any]


def message(role: str, content: Any, **more: Any) -> Document:
    return {"role": role, "content": content} | more


def part(text: str, **more: Any) -> Document:
    return {"type": "text", "text": text} | more


def system(minute: int) -> Document:
    return message("system", f"Be brief.\nCurrent time: 2026-01-05T09:{minute:02}:00Z\nBe kind.")


def note(minute: int) -> str:
    return f"{HEADING}\nCurrent time: 2026-01-05T09:{minute:02}:00Z"


HEAD = message("system", f"Be brief.\nCurrent time: {PLACEHOLDER}\nBe kind.")


def call(number: int) -> list[Document]:
    """An assistant's call and its result."""
    function = {"name": "f", "arguments": json.dumps({"n": number})}
    calls = [{"id": f"c{number}", "type": "function", "function": function}]
    return [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": f"c{number}", "content": f"result {number}"},
    ]


def raw(*messages: Document, **more: Any) -> bytes:
    return json.dumps({"model": "m", "messages": messages} | more).encode()


def sent(process: Process, *messages: Document) -> list[Document]:
    found: list[Document] = json.loads(process.checked(raw(*messages)))["messages"]
    return found
