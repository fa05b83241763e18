"""A session that grows by about a thousand tokens with each request."""

from __future__ import annotations

import json
from typing import Any, Final

from ctxgate.gateway.config import Context
from ctxgate.gateway.replay_policies import parse_rates
from ctxgate.gateway.sessions import Session, parse_session

RATES: Final = parse_rates("5/.5/6.25/25")
CONTEXT: Final = Context(tail_tokens=1500, summary_tokens=600, recall=False)
WORDS: Final = (
    "river",
    "stone",
    "engine",
    "carbon",
    "window",
    "planet",
    "silver",
    "letter",
    "garden",
    "bridge",
)


def session_bytes(requests: int) -> bytes:
    """A tool result of about a thousand tokens per request."""
    messages: list[dict[str, Any]] = [
        {"session": "steady", "tools": []},
        {"role": "system", "content": "You repair software. " * 20},
        {"role": "user", "content": "Read all files and say what is wrong."},
    ]
    for number in range(requests):
        words = " ".join(WORDS[(at * 7 + number * 3 + at // 11) % len(WORDS)] for at in range(300))
        call = {"id": f"c{number}", "type": "function", "function": {"name": "read", "arguments": "{}"}}
        messages.append(
            {"role": "assistant", "content": None, "tool_calls": [call], "_recorded": {"output": 12}}
        )
        messages.append(
            {"role": "tool", "tool_call_id": f"c{number}", "content": f"src/file{number}.py\n{words}"}
        )
    return b"\n".join(json.dumps(each).encode() for each in messages)


def steady(requests: int) -> Session:
    return parse_session(session_bytes(requests), "steady")
