"""Conversations in short: `S U A[a,b] Ra Rb U` is a system, a user, a batch of two calls, its results."""

from __future__ import annotations

import json
from typing import Any

from ctxgate.compression.dialects.chat import Facts, facts_of


def raw(short: str) -> bytes:
    """`S`, `N` (a note), `U`, `A`, `A[a,b]`, `Ra`: messages as the fault reports write them."""
    if short[0] == "R":
        return json.dumps({"role": "tool", "tool_call_id": short[1:], "content": f"result {short}"}).encode()
    role = {"S": "system", "N": "developer", "U": "user", "A": "assistant"}[short[0]]
    message: dict[str, Any] = {"role": role, "content": f"text of {short}"}
    if short[0] == "A" and "[" in short:
        message["tool_calls"] = [
            {"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}}
            for name in short[2:-1].split(",")
        ]
    return json.dumps(message).encode()


def chat(text: str) -> list[Facts]:
    return [facts_of(raw(short)) for short in text.split()]
