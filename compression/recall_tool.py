"""The tool `context_recall`, by which a model asks for what left its prompt; the gateway answers it.

It is offered only where there is something to ask for, and then in every request of the conversation: a
tool list that changes loses the whole prefix cache.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ctxgate.compression.recall_snippet import Snippet
    from ctxgate.compression.said import Call

NAME: Final = "context_recall"
MOST: Final = 10
"""Passages that one call may ask for."""

USUAL: Final = 5
LONGEST: Final = 2_000
"""Characters of a question."""

NOTHING: Final = "Nothing was found. Earlier messages do not seem to say anything about this."
"""The result where nothing is found."""

_TOOL: Final = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": (
            "Search the earlier messages of this conversation that were left out of the prompt, for passages"
            " word for word. Ask by exact strings (paths, ids, errors) or in your own words."
        ),
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "what to look for"},
                "count": {
                    "type": "integer",
                    "minimum": 1,
                    "maximum": MOST,
                    "description": f"passages to return, {USUAL} if not given",
                },
            },
            "required": ["query"],
            "additionalProperties": False,
        },
    },
}
TOOL: Final = msgspec.json.encode(_TOOL)
"""The tool as it stands in a request: the same bytes for ever."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a call of the tool asks for."""

    query: str
    count: int


def offered(tools: Sequence[Any]) -> bool:
    """Whether a request's tools have one of this name already: then it is the client's, and none is added."""
    return any(_name(tool) == NAME for tool in tools)


def wanted(call: Call) -> Wanted | str:
    """What a call asks for, or what is wrong with it, as the model is told."""
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return "Error: the arguments are not JSON."
    query = arguments.get("query") if isinstance(arguments, dict) else None
    if not isinstance(query, str) or not query.strip():
        return "Error: `query` must be a text that is not empty."
    count = arguments.get("count", USUAL)
    if not isinstance(count, int) or isinstance(count, bool):
        return f"Error: `count` must be a whole number from 1 to {MOST}."
    return Wanted(query[:LONGEST], min(max(count, 1), MOST))


def result(call_id: str, found: Snippet | str | None) -> bytes:
    """The tool message that answers a call."""
    text = found if isinstance(found, str) else NOTHING if found is None else found.text
    return msgspec.json.encode({"role": "tool", "tool_call_id": call_id, "content": text})


def _name(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, dict) else None
    return function.get("name") if isinstance(function, dict) else None
