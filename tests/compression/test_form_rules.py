"""Each rule of level `safe` unifies its own difference of two spellings, whichever others are on."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest

from ctxgate.compression.policy import Policy
from ctxgate.compression.rules import Rule
from support.forms import Process

HEAD: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]
CONTENTS: tuple[dict[str, Any], ...] = ({"content": None}, {"content": ""}, {})
ARGUMENTS = ('{"a": 1, "b": 2}', '{"b":2,"a":1}', '{\n "a": 1,\n "b": 2\n}')
TOOLS = ({"name": "f", "parameters": {"a": 1, "b": 2}}, {"parameters": {"b": 2, "a": 1}, "name": "f"})


def body(content: dict[str, Any], arguments: str, tool: dict[str, Any] = TOOLS[0], id_: str = "c1") -> bytes:
    call = {"id": id_, "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [*HEAD, {"role": "assistant"} | content | {"tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": id_, "content": "x"})
    return json.dumps({"messages": messages, "tools": [{"type": "function", "function": tool}]}).encode()


RULES = [
    {rule for rule, on in zip(Rule, chosen, strict=True) if on} for chosen in product((False, True), repeat=4)
]


@pytest.mark.parametrize("rules", RULES, ids=lambda rules: "+".join(sorted(rules)) or "none")
def test_every_set_of_rules_unifies_what_its_members_do(rules: set[Rule]) -> None:
    """Every spelling is sent after every other one; a rule that is off keeps what it would unify apart.

    A message is one form, so a spelling that one rule keeps apart is also apart in what another unifies.
    """
    process = Process(policy=Policy(rules=frozenset(rules)))
    first: dict[tuple[int, int], tuple[int, int]] = {}
    for content, arguments, tool, id_ in product(range(3), range(3), range(2), ("c1", "c2")):
        sent = process.sent(body(CONTENTS[content], ARGUMENTS[arguments], TOOLS[tool], id_))
        unified = {Rule.ARGUMENTS, Rule.EMPTY_CONTENT} & rules
        said = (
            0 if Rule.EMPTY_CONTENT in rules else content,
            0 if Rule.ARGUMENTS in rules else arguments,
        )
        form = first.setdefault(said, (content, arguments)) if unified else (content, arguments)
        assert sent == body(
            CONTENTS[form[0]],
            ARGUMENTS[form[1]],
            TOOLS[0 if Rule.TOOLS in rules else tool],
            "c1" if Rule.CALL_IDS in rules else id_,
        )


def test_a_form_that_one_pool_may_send_does_not_reach_another_with_fewer_rules() -> None:
    """Two pools of one tenant, whose templates allow different rules, share a store."""
    process = Process()
    process.sent(body(CONTENTS[0], ARGUMENTS[0]))
    other = Process(process.forms, policy=Policy(rules=frozenset({Rule.ARGUMENTS})))
    assert other.sent(body(CONTENTS[1], ARGUMENTS[1])) == body(CONTENTS[1], ARGUMENTS[1])
    assert other.sent(body(CONTENTS[1], ARGUMENTS[0])) == body(CONTENTS[1], ARGUMENTS[1])
    assert process.sent(body(CONTENTS[1], ARGUMENTS[1])) == body(CONTENTS[0], ARGUMENTS[0])
