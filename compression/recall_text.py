"""What of a message is searched: its text, and what its calls ask for, without JSON's escapes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctxgate.compression.said import Call, Said


def searchable(said: Said) -> str:
    """The texts of a message, a call as the tool's name and a line for each argument."""
    return "\n".join([each for each in (said.text, *map(_call, said.calls)) if each])


def _call(call: Call) -> str:
    try:
        arguments: Any = json.loads(call.arguments)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        return f"{call.name} {call.arguments}".strip()
    lines = [f"{name}: {_value(value)}" for name, value in arguments.items()]
    return "\n".join([call.name, *lines])


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
