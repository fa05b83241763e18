"""What a client's habit changes from one request to the next, and how that is explained."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from ctxgate.gateway.miss import MissCause
from ctxgate.gateway.perturb import Perturbation

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ctxgate.gateway.sessions import Turn

EXPLAINED: Final[Mapping[tuple[Perturbation, str], tuple[MissCause, str]]] = {
    (Perturbation.CLOCK, "system"): (MissCause.SYSTEM_CHANGED, "volatile_in_head/clock"),
    (Perturbation.TOOL_ORDER, "tool"): (MissCause.REORDERED, "tools_reordered"),
    (Perturbation.JSON_KEYS, "key order"): (MissCause.TOOLS_CHANGED, "tools_reserialized"),
    (Perturbation.JSON_KEYS, "message"): (MissCause.HISTORY_EDITED, "history_reserialized"),
    (Perturbation.LATE_TOOL, "tool"): (MissCause.TOOLS_CHANGED, "tools_changed"),
}
"""Cause and detail by what a habit changed; what it changes of white space alone no prompt shows."""


def what_changed(one: Turn, two: Turn) -> tuple[str, int] | None:
    """What a client's second request changes of its first so that the prompt shows it, and the index."""
    for at, (a, b) in enumerate(zip(one.tools, two.tools, strict=False)):
        if _schema(a) != _schema(b):
            return ("key order" if a == b else "tool"), at
    if len(one.tools) != len(two.tools):
        return "tool", min(len(one.tools), len(two.tools))
    for at, (before, after) in enumerate(zip(one.messages, two.messages, strict=False)):
        if _rendered(before) != _rendered(after):
            return ("system" if at == 0 else "message"), at
    return None


def _schema(tool: Any) -> str:
    """What the prompt shows of a tool: the engine writes the members around its schema in its own order."""
    function = tool["function"]
    return json.dumps([function["name"], function["description"], function["parameters"]])


def _rendered(message: Any) -> str:
    """What the prompt shows of a message: arguments are read and written anew, no content is no content."""
    calls = [
        [each["id"], each["function"]["name"], json.dumps(json.loads(each["function"]["arguments"]))]
        for each in message.get("tool_calls") or ()
    ]
    return json.dumps([message["role"], message.get("content") or "", calls, message.get("tool_call_id")])
