"""Level `safe`: what goes out is what went out first, in any process, and nothing else changes."""

from __future__ import annotations

import hashlib
import json
from itertools import permutations
from typing import Any

import pytest

from ctxgate.compression.first_forms import set_key
from ctxgate.compression.layout import Memory
from support.forms import Forms, Process
from support.seeds import printed


def tool(name: str, keys: str = "ab", **more: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": {key: {"type": "string"} for key in keys}}
    return {"type": "function", "function": {"name": name, "parameters": schema} | more}


def call(arguments: str, id_: str = "c1") -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": "a", "arguments": arguments}}


HEAD: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go."}]
CALLS: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call('{"a": 1, "b": 2}')]}
RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "c1", "content": "found"}
A, B, C, D = (tool(name) for name in "abcd")


def body(messages: list[dict[str, Any]], *tools: dict[str, Any], **more: Any) -> bytes:
    document = {"model": "m", "messages": messages} | ({"tools": tools} if tools else {}) | more
    return json.dumps(document).encode()


def names(raw: bytes) -> str:
    return "".join(each["function"]["name"] for each in json.loads(raw)["tools"])


@pytest.fixture
def process() -> Process:
    return Process()


def test_nothing_new_is_touched(process: Process) -> None:
    raws = [body(HEAD, C, A), body([*HEAD, CALLS, RESULT], C, A), body(HEAD), body([CALLS], stream=True)]
    for raw in raws:
        assert process.result(raw).edits == ()


def test_nothing_is_asked_where_nothing_can_vary(process: Process) -> None:
    assert process.result(body(HEAD)).edits == ()
    assert process.result(body(HEAD, tools=None)).edits == ()
    assert process.result(body(HEAD, tools=[])).edits == ()
    assert process.forms.asked == 0


def test_tools_keep_their_order(process: Process) -> None:
    assert process.sent(body(HEAD, B, A, C)) == body(HEAD, B, A, C)
    for order in permutations((A, B, C)):
        assert process.sent(body([*HEAD, CALLS, RESULT], *order)) == body([*HEAD, CALLS, RESULT], B, A, C)


def test_gateways_l12_a_new_tool_is_appended_and_a_dropped_one_stays_dropped(process: Process) -> None:
    turns = [HEAD + [{"role": "user", "content": "x"}] * n for n in range(6)]
    assert names(process.sent(body(turns[0], B, C))) == "bc"
    assert names(process.sent(body(turns[1], A, C, B))) == "bca"
    assert names(process.sent(body(turns[2], A, B))) == "ba"
    assert names(process.sent(body(turns[3], C, A, B))) == "bac"
    assert names(process.sent(body(turns[4], D, C, B, A))) == "bacd"
    assert names(process.sent(body(turns[5], A, B, C, D))) == "bacd"


def test_several_new_tools_keep_the_order_they_first_came_in(process: Process) -> None:
    turns = [HEAD + [{"role": "user", "content": "x"}] * n for n in range(3)]
    process.sent(body(turns[0], B))
    assert names(process.sent(body(turns[1], D, A, C, B))) == "bdac"
    assert names(process.sent(body(turns[2], A, B, C, D))) == "bdac"
    # Elsewhere too, where that conversation's own first order was another.
    process.sent(body([{"role": "user", "content": "other"}], B))
    assert names(process.sent(body([{"role": "user", "content": "other"}] * 2, C, B, A, D))) == "bdac"


def test_a_set_of_tools_has_one_order_for_every_new_conversation(process: Process) -> None:
    process.sent(body(HEAD, C, A, B))
    other = [{"role": "user", "content": "something else"}]
    assert names(process.sent(body(other, A, B, C))) == "cab"
    assert names(process.sent(body(other, A, B))) == "ab"


def test_a_branch_goes_on_from_the_prefix_it_shares(process: Process) -> None:
    """Edited history finds the longest prefix that is known, not the newest state of the conversation."""
    longer = [*HEAD, {"role": "user", "content": "x"}]
    process.sent(body(HEAD, B, A))
    assert names(process.sent(body(longer, C, A, B))) == "bac"
    assert names(process.sent(body([*HEAD, {"role": "user", "content": "y"}], A, B))) == "ba"
    assert names(process.sent(body([*longer, {"role": "user", "content": "z"}], A, B, C))) == "bac"


def test_one_prefix_has_one_order_whoever_asks(process: Process) -> None:
    """The same messages sent with other tools: both ways of going on are stable, in every process."""
    process.sent(body(HEAD, B, A))
    longer = [*HEAD, {"role": "user", "content": "x"}]
    first = names(process.sent(body(HEAD, D, C, A)))
    assert first == "adc"
    for each in (process, Process(process.forms)):
        assert names(each.sent(body(HEAD, C, A, D))) == "adc"
        assert names(each.sent(body(longer, C, D, A))) == "adc"


def test_context_j14_schemas_go_out_in_the_text_of_their_first_sight(process: Process) -> None:
    process.sent(body(HEAD, tool("a", "ab"), B))
    later = [*HEAD, CALLS, RESULT]
    raw = body(later, tool("a", "ba", description=None), B)
    assert process.sent(raw) == body(later, tool("a", "ab"), B)
    other = [{"role": "user", "content": "another conversation"}]
    assert process.sent(body(other, tool("a", "ba"))) == body(other, tool("a", "ab"))


def test_a_changed_tool_goes_to_the_end(process: Process) -> None:
    """What changes once often changes again; in front it would cost the tools behind it each time."""
    process.sent(body(HEAD, A, B, C))
    later = [*HEAD, CALLS, RESULT]
    assert process.sent(body(later, tool("a", "x"), B, C)) == body(later, B, C, tool("a", "x"))


@pytest.mark.parametrize(
    "form",
    [
        CALLS | {"content": ""},
        {"role": "assistant", "tool_calls": CALLS["tool_calls"]},
        CALLS | {"refusal": None},
        CALLS | {"tool_calls": [call('{"b":2,"a":1}')]},
        CALLS | {"tool_calls": [call('{\n  "a": 1,\n  "b": 2\n}')]},
    ],
)
def test_calls_go_out_in_the_text_of_their_first_sight(process: Process, form: dict[str, Any]) -> None:
    process.sent(body([*HEAD, CALLS, RESULT]))
    longer = [RESULT, {"role": "user", "content": "  more  "}]
    result = process.result(body([*HEAD, form, *longer]))
    assert process.sent(body([*HEAD, form, *longer])) == body([*HEAD, CALLS, *longer])
    assert [edit.field for edit in result.reasons] == ["messages[2]"]


def test_other_calls_are_left_alone(process: Process) -> None:
    process.sent(body([*HEAD, CALLS, RESULT]))
    for other in ('{"a": 1, "b": 2.0}', '{"a": 1}', '{"a": 1, "b": 2', ""):
        raw = body([*HEAD, CALLS | {"tool_calls": [call(other)]}, RESULT])
        assert process.sent(raw) == raw


def test_everything_else_keeps_its_bytes(process: Process) -> None:
    raw = body([*HEAD, CALLS, RESULT], A, B)
    process.sent(raw)
    odd = (
        b' {"x": 1e400 , "tools":[ \n%s\t,%s ]\n, "messages"\t: [%s,\r\n%s , %s,%s ]'
        b' ,"y":"\\u00e9\\"tools\\":["}\n'
    )
    wide = json.dumps(CALLS | {"content": ""}, indent=3).encode()
    parts = [json.dumps(part).encode() for part in (B, A, *HEAD, RESULT)]
    sent = process.sent(odd % (*parts[:4], wide, parts[4]))
    assert sent == odd % (parts[1], parts[0], *parts[2:4], json.dumps(CALLS).encode(), parts[4])


def test_context_k1_cache_markers_go_out_as_they_came_and_none_is_added(process: Process) -> None:
    """Four of the client's, on tools, system and two messages: its limit, which is not ours to spend."""
    mark = {"cache_control": {"type": "ephemeral"}}

    def marked(text: str) -> list[dict[str, Any]]:
        return [{"type": "text", "text": text} | mark]

    head = [{"role": "system", "content": marked("Be brief.")}, {"role": "user", "content": marked("Go.")}]
    process.sent(body([*head, CALLS, RESULT], A, B | mark))
    later = [*head, CALLS | {"content": ""}, RESULT, {"role": "user", "content": marked("x")}]
    assert process.sent(body(later, B | mark, A)) == body([*later[:2], CALLS, *later[3:]], A, B | mark)


def test_gateways_l4_a_marker_that_moves_on_is_the_clients(process: Process) -> None:
    """A form that was first sent without a marker, or with one, never stands in for the other."""
    mark = {"cache_control": {"type": "ephemeral"}}
    content = [{"type": "text", "text": "I look."}]
    plain = CALLS | {"content": content}
    marked = CALLS | {"content": [content[0] | mark]}
    for first, second in ((plain, marked), (marked, plain)):
        process.sent(body([*HEAD, first, RESULT]))
        raw = body([*HEAD, second, RESULT, {"role": "user", "content": "x"}])
        assert process.sent(raw) == raw


def test_tenants_share_nothing(process: Process) -> None:
    process.sent(body([*HEAD, CALLS, RESULT], A, B))
    raw = body([*HEAD, CALLS | {"content": ""}, RESULT], tool("b", "ba"), A)
    assert Process(process.forms, tenant="acme/beta").sent(raw) == raw


@pytest.mark.parametrize(
    "tools",
    [
        [A, tool("a", "x")],
        [A, A],
        [A, 5],
        [{"type": "function", "function": 5}, A],
        [{"type": "x"}, {"type": "y"}],
    ],
)
def test_tools_that_cannot_be_told_apart_are_left_alone(process: Process, tools: list[Any]) -> None:
    process.sent(body(HEAD, A))
    raw = body(HEAD, tools=tools)
    assert process.sent(raw) == raw


def test_of_repeated_messages_the_last_ones_count(process: Process) -> None:
    process.sent(body([CALLS]))
    first, other = json.dumps([CALLS]).encode(), json.dumps([CALLS | {"content": ""}]).encode()
    raw = b'{"messages":%s,"x":{"messages":%s},"messages":%s,"model":"m"}'
    assert process.sent(raw % (other, other, other)) == raw % (other, other, first)


def test_repeated_tools_leave_everything_as_it_came(process: Process) -> None:
    process.sent(body(HEAD, B, A))
    tools = json.dumps([A, B]).encode()
    raw = b'{"tools":[1],"messages":%s,"tools":%s}' % (json.dumps(HEAD).encode(), tools)
    result = process.result(raw)
    assert (result.edits, result.dropped) == ((), "hidden")


def test_a_second_process_and_one_without_memory_send_the_same_bytes() -> None:
    forms = Forms()
    turns = [
        body(HEAD, C, B, A),
        body([*HEAD, CALLS, RESULT], B, tool("a", "ba"), C),
        body([*HEAD, CALLS | {"content": ""}, RESULT, {"role": "user", "content": "x"}], D, A, B, C),
        body([*HEAD, CALLS, RESULT] + [{"role": "user", "content": "x"}] * 2, A, B, C, D),
    ]
    one = Process(forms)
    sent = [one.sent(turn) for turn in turns]
    assert [names(each) for each in sent] == ["cba", "cba", "cbad", "cbad"]
    assert [Process(forms).sent(turn) for turn in turns] == sent
    small = Process(forms, memory=Memory(conversations=1))
    assert [small.sent(turn) for turn in turns] == sent


PLAYED = """
import hashlib, json, sys
from support.forms import Process
process, digest = Process(), hashlib.sha256()
for turn in json.load(sys.stdin):
    digest.update(process.sent(turn.encode()))
print(digest.hexdigest())
"""


def test_the_hash_seed_of_the_interpreter_changes_nothing() -> None:
    tools = [tool(name * 3, "abc") for name in "defghijk"]
    turns = [
        body([*HEAD, CALLS, RESULT] + [{"role": "user", "content": "x"}] * n, *tools[n:], *tools[: n // 2])
        for n in range(8)
    ]
    document = json.dumps([turn.decode() for turn in turns])
    found = printed(PLAYED, document, "1", "2", "3")
    process = Process()
    expected = hashlib.sha256(b"".join([process.sent(turn) for turn in turns])).hexdigest()
    assert found == {expected + "\n"}


def test_a_known_turn_asks_the_store_once(process: Process) -> None:
    process.sent(body(HEAD, A, B))
    before = process.forms.asked
    process.sent(body([*HEAD, CALLS, RESULT], B, A))
    assert process.forms.asked == before + 1


def test_the_key_of_a_set_does_not_depend_on_its_order() -> None:
    one, two = b"1" * 32, b"2" * 32
    assert set_key([one, two]) == set_key([two, one]) != set_key([one])
