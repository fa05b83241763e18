"""Where two requests part: kinds, places and bytes, by hand, by properties, and on real sessions."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxgate.compression.diverge import NotChat, common_prefix, diverge, volatile_at_difference
from ctxgate.compression.divergence import DivergenceKind as Kind
from ctxgate.compression.volatile import VolatileKind
from ctxgate.inference import wire

SYSTEM = {"role": "system", "content": "Be brief.\nCurrent time: 2026-01-05T09:00:00Z"}
CALLS = [
    {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a", "n": 1.0}'}},
    {"id": "c2", "type": "function", "function": {"name": "read", "arguments": "{}"}},
]
CALL: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": CALLS}
RESULTS = [
    {"role": "tool", "tool_call_id": "c1", "content": "one"},
    {"role": "tool", "tool_call_id": "c2", "content": "two"},
]
HISTORY: list[dict[str, Any]] = [SYSTEM, {"role": "user", "content": "go"}, CALL, *RESULTS]
MORE = [{"role": "assistant", "content": "done"}, {"role": "user", "content": "again"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"The {name} tool.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "n": {"type": "number"}},
            },
        },
    }
    for name in ("read", "write", "run")
]


def body(messages: Any, tools: Any = None, **members: Any) -> wire.Body:
    request = {"model": "m", **({} if tools is None else {"tools": tools}), "messages": messages, **members}
    return wire.parse(json.dumps(request).encode())


def size(*elements: Any) -> int:
    return sum(len(json.dumps(element)) for element in elements)


def replaced(at: int, *new: Any, items: list[Any] | None = None) -> list[Any]:
    """HISTORY, or other items, with others in place of the one at a position."""
    items = HISTORY if items is None else items
    return [*items[:at], *new, *items[at + 1 :]]


def edited(at: int, **fields: Any) -> list[Any]:
    return replaced(at, {**HISTORY[at], **fields})


def recalled(arguments: str | None = None, call: int = 0, **fields: Any) -> list[Any]:
    """HISTORY with other arguments, or other fields, of one tool call."""
    calls = json.loads(json.dumps(CALLS))
    calls[call].update(fields)
    if arguments is not None:
        calls[call]["function"]["arguments"] = arguments
    return edited(2, tool_calls=calls)


def with_function(tool: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {**tool, "function": {**tool["function"], **fields}}


def edited_tool(at: int, **fields: Any) -> list[Any]:
    return replaced(at, with_function(TOOLS[at], **fields), items=TOOLS)


ARGUMENTS = "messages[2].tool_calls[0].function.arguments"
LATER = {**SYSTEM, "content": "Be brief.\nCurrent time: 2026-01-05T09:00:47Z"}
BARE = {key: value for key, value in CALL.items() if key != "content"}
PARTS = [{"type": "text", "text": "go"}]
MARKED = [{"type": "text", "text": "go", "cache_control": {"type": "ephemeral"}}]
FLIPPED = {"content": "go", "role": "user"}

# What the second request has in place of HISTORY, and where it parts from it.
MESSAGE_CASES: list[tuple[str, list[Any], Kind, str, bool]] = [
    ("grows", [*HISTORY, *MORE], Kind.EXTENDS, "", False),
    ("is sent again", HISTORY, Kind.EXTENDS, "", False),
    ("clock", [LATER, *HISTORY[1:]], Kind.VOLATILE_IN_HEAD, "messages[0].content", True),
    ("new rule", edited(0, content="Be long."), Kind.SYSTEM_CHANGED, "messages[0].content", True),
    ("no system", [*HISTORY[1:], *MORE], Kind.SYSTEM_CHANGED, "messages[0].role", True),
    ("system replaced", edited(0, role="user"), Kind.SYSTEM_CHANGED, "messages[0].role", True),
    ("system added", [SYSTEM, SYSTEM, *HISTORY[1:]], Kind.SYSTEM_CHANGED, "messages[1].role", True),
    ("word edited", edited(1, content="gone"), Kind.HISTORY_EDITED, "messages[1].content", True),
    (
        "clock in history",
        edited(4, content=LATER["content"]),
        Kind.HISTORY_EDITED,
        "messages[4].content",
        True,
    ),
    ("argument edited", recalled('{"path": "b", "n": 1.0}'), Kind.HISTORY_EDITED, ARGUMENTS, True),
    ("argument keys", recalled('{"n": 1.0, "path": "a"}'), Kind.HISTORY_RESERIALIZED, ARGUMENTS, True),
    ("argument spaces", recalled('{"path":"a","n":1e0}'), Kind.HISTORY_RESERIALIZED, ARGUMENTS, False),
    ("argument broken", recalled('{"path": "a", "n": 1.0'), Kind.HISTORY_EDITED, ARGUMENTS, True),
    ("second call", recalled('{"x": 1}', 1), Kind.HISTORY_EDITED, ARGUMENTS.replace("[0]", "[1]"), True),
    ("call id", recalled(id="c9"), Kind.HISTORY_EDITED, "messages[2].tool_calls[0].id", True),
    ("call dropped", edited(2, tool_calls=CALLS[:1]), Kind.HISTORY_EDITED, "messages[2].tool_calls[1]", True),
    ("empty content", edited(2, content=""), Kind.HISTORY_RESERIALIZED, "messages[2].content", False),
    ("missing content", replaced(2, BARE), Kind.HISTORY_RESERIALIZED, "messages[2].content", False),
    ("content appears", edited(2, content="Hm."), Kind.HISTORY_EDITED, "messages[2].content", True),
    ("text as a part", edited(1, content=PARTS), Kind.HISTORY_RESERIALIZED, "messages[1].content", False),
    ("member order", replaced(1, FLIPPED), Kind.HISTORY_RESERIALIZED, "messages[1]", False),
    ("null member", edited(1, name=None), Kind.HISTORY_RESERIALIZED, "messages[1].name", False),
    (
        "mark",
        edited(1, cache_control={"a": 1}),
        Kind.HISTORY_RESERIALIZED,
        "messages[1].cache_control",
        False,
    ),
    ("mark on a part", edited(1, content=MARKED), Kind.HISTORY_RESERIALIZED, "messages[1].content", False),
    ("results swapped", [*HISTORY[:3], *RESULTS[::-1]], Kind.HISTORY_REORDERED, "messages[3]", True),
    ("oldest dropped", [SYSTEM, *HISTORY[2:], *MORE], Kind.HISTORY_TRUNCATED, "messages[1]", True),
    ("newest dropped", HISTORY[:3], Kind.HISTORY_TRUNCATED, "messages[3]", False),
    ("message inserted", replaced(2, MORE[1], CALL), Kind.HISTORY_EDITED, "messages[2].role", True),
    ("summary", [SYSTEM, MORE[1], *RESULTS], Kind.HISTORY_COMPACTED, "messages[1]", True),
    ("as many", [SYSTEM, MORE[1], RESULTS[1], *MORE], Kind.HISTORY_COMPACTED, "messages[1]", True),
]


@pytest.mark.parametrize(
    ("after", "kind", "field", "rendered"),
    [case[1:] for case in MESSAGE_CASES],
    ids=[case[0] for case in MESSAGE_CASES],
)
def test_messages(after: list[Any], kind: Kind, field: str, rendered: bool) -> None:
    found = diverge(body(HISTORY, TOOLS), body(after, TOOLS))
    index = int(field[len("messages[")]) if field else None
    assert (found.kind, found.field, found.index, found.rendered) == (kind, field, index, rendered)
    if index is not None and index < len(after):
        one, two = json.dumps(HISTORY[index]), json.dumps(after[index])
        assert one[: found.offset] == two[: found.offset]
        assert one[found.offset : found.offset + 1] != two[found.offset : found.offset + 1]
        assert found.kept_bytes == size(*TOOLS, *after[:index]) + found.offset


PROPERTIES = {"path": {"type": "string"}, "n": {"type": "number"}}
FLIPPED_SCHEMA = {"properties": PROPERTIES, "type": "object"}
FLIPPED_TOOL = {"function": TOOLS[1]["function"], "type": "function"}
LATE_TOOL = with_function(TOOLS[0], name="late")
DESCRIPTION, PARAMETERS = "function.description", "function.parameters"
TOOL_CASES: list[tuple[str, list[Any] | None, Kind, str, int]] = [
    ("late tool", [*TOOLS, LATE_TOOL], Kind.TOOLS_CHANGED, "tools[3]", 3),
    ("last tool gone", TOOLS[:2], Kind.TOOLS_CHANGED, "tools[2]", 2),
    ("first tool gone", TOOLS[1:], Kind.TOOLS_CHANGED, "tools[0].function.name", 0),
    ("no tools", None, Kind.TOOLS_CHANGED, "tools[0]", 0),
    ("reordered", [TOOLS[0], TOOLS[2], TOOLS[1]], Kind.TOOLS_REORDERED, "tools[1]", 1),
    ("reworded", edited_tool(1, description="Else."), Kind.TOOLS_CHANGED, f"tools[1].{DESCRIPTION}", 1),
    ("schema", edited_tool(2, parameters={}), Kind.TOOLS_CHANGED, f"tools[2].{PARAMETERS}", 2),
    ("keys", edited_tool(1, parameters=FLIPPED_SCHEMA), Kind.TOOLS_RESERIALIZED, f"tools[1].{PARAMETERS}", 1),
    ("wrapper", replaced(1, FLIPPED_TOOL, items=TOOLS), Kind.TOOLS_RESERIALIZED, "tools[1]", 1),
]


@pytest.mark.parametrize(
    ("after", "kind", "field", "index"),
    [case[1:] for case in TOOL_CASES],
    ids=[case[0] for case in TOOL_CASES],
)
def test_tools(after: list[Any] | None, kind: Kind, field: str, index: int) -> None:
    found = diverge(body(HISTORY, TOOLS), body([*HISTORY, *MORE], after))
    assert (found.kind, found.field, found.index) == (kind, field, index)
    assert found.kept_bytes == size(*(after or [])[:index]) + found.offset
    # All messages of the first request are in the second, so all of them could have been cached.
    assert found.shared_messages == len(HISTORY)
    assert found.avoidable_bytes >= size(*HISTORY)


def test_the_wrapper_of_a_tool_does_not_reach_the_prompt_and_its_schema_does() -> None:
    wrapper = replaced(1, FLIPPED_TOOL, items=TOOLS)
    assert not diverge(body(HISTORY, TOOLS), body(HISTORY, wrapper)).rendered
    assert diverge(body(HISTORY, TOOLS), body(HISTORY, edited_tool(1, parameters=FLIPPED_SCHEMA))).rendered
    both = replaced(2, with_function(TOOLS[2], parameters={}), items=wrapper)
    found = diverge(body(HISTORY, TOOLS), body(HISTORY, both), rendered_only=True)
    assert (found.kind, found.index, found.rendered) == (Kind.TOOLS_CHANGED, 2, True)


def test_a_clock_in_the_description_of_a_tool() -> None:
    texts = [f"Runs it. Current time: 09:0{minute}." for minute in (1, 2)]
    one, two = (body(HISTORY, [with_function(TOOLS[0], description=text)]) for text in texts)
    found = diverge(one, two)
    assert (found.kind, found.volatile) == (Kind.VOLATILE_IN_HEAD, VolatileKind.CLOCK)
    assert found.field == "tools[0].function.description"


@pytest.mark.parametrize(
    ("members", "kind", "field"),
    [
        ({"model": "other"}, Kind.MODEL_CHANGED, "model"),
        ({"cache_salt": "s"}, Kind.SALT, "cache_salt"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, Kind.TEMPLATE_CHANGED, "chat_template_kwargs"),
        ({"reasoning_effort": "high"}, Kind.TEMPLATE_CHANGED, "reasoning_effort"),
        ({"temperature": 1, "stream": True, "max_tokens": 3, "cache_salt": None}, Kind.EXTENDS, ""),
    ],
)
def test_fields_of_the_request(members: dict[str, Any], kind: Kind, field: str) -> None:
    found = diverge(body(HISTORY, TOOLS), body([*HISTORY, *MORE], TOOLS, **members))
    assert (found.kind, found.field, found.index) == (kind, field, None)
    if kind is not Kind.EXTENDS:
        assert found.kept_bytes == 0
        assert found.avoidable_bytes == size(*TOOLS, *HISTORY)


def test_what_could_have_been_cached_behind_a_changed_clock() -> None:
    after = [LATER, *HISTORY[1:]]
    found = diverge(body(HISTORY, TOOLS), body([*after, *MORE], TOOLS))
    # The rest of the system message from `47` on holds `Z"}` in common.
    assert found.avoidable_bytes == len('Z"}') + size(*HISTORY[1:])
    assert found.avoidable_tokens() == -(-found.avoidable_bytes // 4)
    assert found.shared_messages == len(HISTORY)


def test_what_could_have_been_cached_of_a_truncated_history() -> None:
    found = diverge(body(HISTORY), body([SYSTEM, *HISTORY[3:], *MORE]))
    assert found.avoidable_bytes == size(*HISTORY[3:]) - found.offset
    assert found.shared_messages == 3


def test_the_first_difference_wins_and_the_first_rendered_one_can_be_asked_for() -> None:
    after = edited(2, content="")
    after = [*after[:4], {**RESULTS[1], "content": "new"}]
    first = diverge(body(HISTORY), body(after))
    assert (first.kind, first.index, first.rendered) == (Kind.HISTORY_RESERIALIZED, 2, False)
    second = diverge(body(HISTORY), body(after), rendered_only=True)
    assert (second.kind, second.index, second.rendered) == (Kind.HISTORY_EDITED, 4, True)


def test_tools_come_before_system_messages_and_these_before_the_history() -> None:
    after = [{**SYSTEM, "content": "Other."}, MORE[1], *HISTORY[2:]]
    assert diverge(body(HISTORY, TOOLS), body(after, TOOLS[::-1])).field == "tools[0]"
    assert diverge(body(HISTORY, TOOLS), body(after, TOOLS)).field == "messages[0].content"


def test_a_late_developer_message_is_rendered_at_the_front() -> None:
    after = [*HISTORY, *MORE, {"role": "developer", "content": "Note."}]
    found = diverge(body(HISTORY), body(after))
    assert (found.kind, found.index) == (Kind.SYSTEM_CHANGED, len(after) - 1)
    late = [*HISTORY, *MORE, {"role": "system", "content": "Note."}]
    assert diverge(body(HISTORY), body(late)).kind is Kind.EXTENDS


def test_bodies_that_are_no_chat() -> None:
    good = body(HISTORY)
    for raw in (b'{"model":"m","prompt":"x"}', b'{"messages":{}}', b'{"messages":null}'):
        with pytest.raises(NotChat, match="second"):
            diverge(good, wire.parse(raw))
    with pytest.raises(NotChat, match="tools"):
        diverge(good, body(HISTORY, {}))


def test_odd_elements_are_compared_and_never_crash() -> None:
    odd: list[Any] = [
        1,
        None,
        "x",
        [],
        {},
        {"role": 5},
        {"role": "user", "content": 7},
        {"tool_calls": [3, {"function": 4}]},
    ]
    for one in odd:
        for two in odd:
            found = diverge(body([one, *HISTORY], [two]), body([two, *HISTORY], [one]))
            assert (found.kind is Kind.EXTENDS) is (json.dumps(one) == json.dumps(two))


def test_a_line_for_logs_holds_no_text_of_the_prompts() -> None:
    for after in (case[1] for case in MESSAGE_CASES):
        found = diverge(body(HISTORY), body(after))
        for text in (found.describe(), repr(found)):
            assert "brief" not in text
            assert "go" not in text
            assert "2026" not in text


def test_the_line_for_logs_and_the_prose() -> None:
    after = [LATER, *HISTORY[1:]]
    found = diverge(body(HISTORY), body(after))
    assert found.describe() == (
        f"volatile_in_head (clock) at messages[0].content, byte {found.offset}: "
        f"~{found.avoidable_tokens()} tokens avoidable"
    )
    assert found.prose() == (
        "`messages[0].content` holds the time of day, which changed.\n"
        "  before: \u2026 time: 2026-01-05T09:00:00Z\n"
        "  after:  \u2026 time: 2026-01-05T09:00:47Z"
    )


def test_prose_shows_nothing_that_a_terminal_acts_on() -> None:
    after = edited(1, content="\x1b[31mred\n\u202e")
    assert "  after:  \\u001b[31mred\\n\\u202e" in diverge(body(HISTORY), body(after)).prose()


STATUS = "gitStatus:\n" + "".join(f" M src/module_{number}.py\n" for number in range(30))
FAR = "\nWrite short sentences." * 20  # more than is searched at first


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        ("step 17.", "step 171.", VolatileKind.COUNTER),
        ("Current time: 09:00", "Current time: 10:00", VolatileKind.CLOCK),
        ("tokens left: 9", "tokens left: 8", VolatileKind.USAGE),
        ("Version 1.2", "Version 1.3", None),
        ("Current time: 09:00", "Current time: unknown", None),
        ("Be brief. Current time: 09:00", "Be short. Current time: 10:00", None),
        (STATUS + " M last.py\n", STATUS + " M lost.py\n", VolatileKind.GIT),
        ("Step 3: rest." + FAR + "\nstep 17\n", "Step 3: rest." + FAR + "\nstep 18\n", None),
        (FAR + "\nstep 17\n", FAR + "\nstep 18\n", VolatileKind.COUNTER),
        ("x-some-header: " + "a b " * 70 + "1", "x-some-header: " + "a b " * 70 + "2", VolatileKind.HEADER),
        (FAR + "\nCurrent time: 09:00" + FAR, FAR + "\nCurrent time: 09:30" + FAR, VolatileKind.CLOCK),
    ],
)
def test_the_volatile_span_at_a_difference(before: str, after: str, kind: VolatileKind | None) -> None:
    assert volatile_at_difference(before, after) is kind


# ---- properties ------------------------------------------------------------------------------------------

CONTENT = st.sampled_from(["a", "b", "Current time: 2026-01-05T09:00:00Z", "", None])
MESSAGE = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["system", "user", "assistant", "tool", "developer"]),
    CONTENT,
)
MESSAGES = st.lists(MESSAGE | st.just(CALL), max_size=7)
TOOL_LISTS = st.lists(st.sampled_from(TOOLS), max_size=4)


@given(st.binary(max_size=40), st.binary(max_size=40), st.binary(max_size=40))
def test_the_common_prefix_is_that_of_a_plain_loop(head: bytes, a: bytes, b: bytes) -> None:
    one, two = head + a, head + b
    expected = 0
    while expected < min(len(one), len(two)) and one[expected] == two[expected]:
        expected += 1
    assert common_prefix(one, two) == expected


@given(MESSAGES, MESSAGES, TOOL_LISTS)
def test_a_request_extends_any_request_that_it_begins_with(
    messages: list[Any], more: list[Any], tools: list[Any]
) -> None:
    more = [message for message in more if message["role"] not in ("developer", "system")]
    found = diverge(body(messages, tools), body([*messages, *more], tools))
    assert found.kind is Kind.EXTENDS
    assert found.kept_bytes == size(*tools, *messages)
    assert found.avoidable_bytes == 0


@given(MESSAGES, MESSAGES, TOOL_LISTS, TOOL_LISTS)
def test_bytes_add_up_whatever_differs(
    before: list[Any], after: list[Any], tools: list[Any], others: list[Any]
) -> None:
    found = diverge(body(before, tools), body(after, others))
    assert found.avoidable_bytes >= 0
    assert found.kept_bytes + found.avoidable_bytes <= size(*others, *after)
    assert found.shared_messages <= len(after)
    assert found == diverge(body(before, tools), body(after, others))
    if found.kind is Kind.EXTENDS:
        assert tools == others
    if found.kind is Kind.VOLATILE_IN_HEAD:
        assert found.volatile is not None


@given(MESSAGES.filter(bool), st.data())
def test_one_edited_word_is_found_where_it_is(messages: list[Any], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(messages) - 1))
    messages = [{"role": "user", "content": "first"}, *messages]
    other = replaced(at, {"role": messages[at]["role"], "content": f"edited {messages[at]}"}, items=messages)
    found = diverge(body(messages), body(other))
    assert found.kind in (Kind.HISTORY_EDITED, Kind.SYSTEM_CHANGED)
    assert found.index == at


def test_a_volatile_span_deep_in_a_long_text_is_named_in_little_time() -> None:
    """Only what stands around the difference is searched, whatever the length of the whole."""
    words = "alpha beta gamma " * 4_000
    one, two = (f"{words}\nCurrent time: 2026-11-30T09:00:{second:02}Z\n{words}" for second in (0, 47))
    assert volatile_at_difference(one, two) is VolatileKind.CLOCK
    assert volatile_at_difference(words + "x", words + "y") is None
