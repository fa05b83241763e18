"""Agents' conversations that outgrow a window."""

from __future__ import annotations

import json
import random
from typing import Any

WORDS = [
    "alpha",
    "beta",
    "gamma",
    "delta",
    "build",
    "test",
    "error",
    "file",
    "path",
    "module",
    "return",
    "value",
]
TASK = {"role": "user", "content": "Port the billing service. Never commit to main."}
SYSTEM = {"role": "system", "content": "You are an agent."}


def long_chat(rounds: int, *, words: int = 120, seed: int = 1) -> list[dict[str, Any]]:
    """A system message, the task, and rounds of one call each; the user speaks in every fifth."""
    draw = random.Random(seed)
    messages: list[dict[str, Any]] = [SYSTEM, TASK]
    for number in range(rounds):
        function = {"name": "bash", "arguments": json.dumps({"command": f"make test-{number} -j 2"})}
        call = {"id": f"c{number}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": f"I run part {number}.", "tool_calls": [call]})
        result = " ".join(draw.choice(WORDS) for _ in range(words))
        messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": result})
        if number % 5 == 4:
            messages.append({"role": "assistant", "content": f"Part {number} is done."})
            messages.append({"role": "user", "content": f"You must always keep file {number} unchanged."})
    return messages


def requests_of(messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The histories that an agent sends: those that end with a user or tool message."""
    ends = [at for at in range(2, len(messages) + 1) if messages[at - 1]["role"] in ("user", "tool")]
    return [messages[:end] for end in ends]
