"""The head of a prompt and the volatile text in it."""

from __future__ import annotations

import json
from typing import Any

from ctxgate.compression.head import head_texts, volatile_head
from ctxgate.compression.volatile import VolatileKind
from ctxgate.inference import wire


def body(**members: Any) -> wire.Body:
    return wire.parse(json.dumps(members).encode())


def tool(description: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "t", "description": description}}


def test_descriptions_then_the_leading_messages() -> None:
    chat = body(
        messages=[
            {"role": "system", "content": "One."},
            {
                "role": "developer",
                "content": [{"type": "text", "text": "Two."}, {"type": "text", "text": "Three."}],
            },
            {"role": "user", "content": "Four."},
            {"role": "system", "content": "Five."},
        ],
        tools=[tool("Six."), tool(None), tool("Seven.")],
    )
    assert [(one.field, one.element, one.text) for one in head_texts(chat)] == [
        ("tools[0].function.description", 0, "Six."),
        ("tools[2].function.description", 2, "Seven."),
        ("messages[0].content", 3, "One."),
        ("messages[1].content", 4, "Two.\nThree."),
    ]


def test_spans_name_their_field() -> None:
    chat = body(
        messages=[
            {"role": "system", "content": "Current time: 09:00"},
            {"role": "user", "content": "now: 09:00"},
        ],
        tools=[tool("Pid: none. PID: 4821")],
    )
    assert [(one.head.field, one.span.kind) for one in volatile_head(chat)] == [
        ("tools[0].function.description", VolatileKind.PID),
        ("messages[0].content", VolatileKind.CLOCK),
    ]


def test_bodies_of_other_shapes_have_no_head() -> None:
    shapes: list[dict[str, Any]] = [
        {},
        {"messages": None},
        {"messages": 5, "tools": {}},
        {"messages": [], "tools": None},
        {"messages": [7], "tools": [1, {"function": 2}, {"function": {"description": 3}}, {}]},
        {"messages": [{"role": "system"}, {"role": "system", "content": 4}]},
    ]
    for members in shapes:
        assert list(head_texts(body(**members))) == []
