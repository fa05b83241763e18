"""A body with more messages is the one that a parser finds in its bytes."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ctxgate.inference import wire
from ctxgate.inference.expand import expanded

TOOL = b'{"type":"function","function":{"name":"more"}}'
TEXTS = st.text(max_size=8)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.just("user"), "content": TEXTS}), min_size=1, max_size=5
)


def body(messages: Any, *, tools: Any = None, first: bool = False) -> wire.Body:
    members = {"model": "m"} | ({"tools": tools} if tools is not None and first else {})
    members |= {"messages": messages} | ({"tools": tools} if tools is not None and not first else {})
    return wire.parse(json.dumps(members).encode())


@given(MESSAGES, st.dictionaries(st.integers(0, 4), st.lists(TEXTS, min_size=1, max_size=3)), st.booleans())
def test_what_is_worked_out_is_what_a_parser_finds(
    messages: list[Any], items: dict[int, list[str]], first: bool
) -> None:
    items = {at: texts for at, texts in items.items() if at < len(messages)}
    tools = [{"type": "function", "function": {"name": "read"}}]
    before = body(messages, tools=tools, first=first)
    texts = {
        at: [json.dumps({"role": "user", "content": each}).encode() for each in new]
        for at, new in items.items()
    }
    found = expanded(before, texts, TOOL)
    assert found is not None
    wanted = [
        {"role": "user", "content": each}
        for at, message in enumerate(messages)
        for each in items.get(at, [message["content"]])
    ]
    parsed = wire.parse(found.raw)
    assert json.loads(found.raw) == {"model": "m", "messages": wanted, "tools": [*tools, json.loads(TOOL)]}
    assert list(map(bytes, found.items("messages"))) == list(map(bytes, parsed.items("messages")))
    assert list(map(bytes, found.items("tools"))) == list(map(bytes, parsed.items("tools")))
    assert found.frame() == parsed.frame()
    assert found.get("model") == parsed.get("model")


def test_nothing_is_changed_where_a_place_is_not_certain() -> None:
    one = [{"role": "user", "content": "x"}]
    assert expanded(body(one), {}, TOOL) is None
    assert expanded(body(one, tools=[]), {}, TOOL) is None
    assert expanded(body(one, tools={"a": 1}), {}, TOOL) is None
    assert expanded(body(one), {0: [b'{"a":1},{"b":2}']}) is None
    assert expanded(body(one), {0: [b"{"]}) is None
    twice = wire.parse(b'{"tools":[{"a":1}],"messages":[{"role":"user"}],"tools":[{"b":2}]}')
    found = expanded(twice, {}, TOOL)
    assert found is None or json.loads(found.raw)["tools"] == [{"b": 2}, json.loads(TOOL)]
