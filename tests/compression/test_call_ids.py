"""Ids of tool calls go out as they were first sent, each result still answers its call, all else stays."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ctxgate.compression.layout import Memory
from ctxgate.compression.policy import Policy
from ctxgate.compression.rules import ALL_RULES, Rule
from support.forms import Forms, Process

HEAD: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go."}]


def call(id_: str | None, name: str = "f", arguments: str = '{"a": 1}') -> dict[str, Any]:
    named = {} if id_ is None else {"id": id_}
    return named | {"type": "function", "function": {"name": name, "arguments": arguments}}


def calls(*ids: str | None) -> dict[str, Any]:
    each = [call(id_, name) for id_, name in zip(ids, "fgh", strict=False)]
    return {"role": "assistant", "content": None, "tool_calls": each}


def result(id_: str, content: str = "found") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id_, "content": content}


def body(*messages: dict[str, Any]) -> bytes:
    return json.dumps({"model": "m", "messages": [*HEAD, *messages]}).encode()


def ids(raw: bytes) -> list[Any]:
    """Each message's ids: those of its calls, or the one that it answers."""
    found: list[Any] = []
    for message in json.loads(raw)["messages"][len(HEAD) :]:
        own = [each.get("id") for each in message.get("tool_calls", ())]
        found.append(own or message.get("tool_call_id"))
    return found


@pytest.fixture
def process() -> Process:
    return Process()


def test_ids_made_up_anew_go_out_as_they_were_first_sent(process: Process) -> None:
    first = body(calls("a1"), result("a1"))
    assert process.sent(first) == first
    second = process.sent(body(calls("b1"), result("b1"), calls("b2", "b3"), result("b2"), result("b3")))
    assert second == body(calls("a1"), result("a1"), calls("b2", "b3"), result("b2"), result("b3"))
    third = body(calls("c1"), result("c1"), calls("c2", "c3"), result("c2"), result("c3"), HEAD[1])
    assert process.sent(third) == second[:-2] + b", " + json.dumps(HEAD[1]).encode() + b"]}"


def test_the_reasons_name_every_message_that_changes(process: Process) -> None:
    process.sent(body(calls("a1"), result("a1")))
    made = process.result(body(calls("b1"), result("b1"), HEAD[1])).reasons
    assert [reason.field for reason in made] == ["messages[2]", "messages[3]"]


def test_results_in_another_order_still_answer_their_calls(process: Process) -> None:
    process.sent(body(calls("a", "b"), result("b", "of b"), result("a", "of a")))
    sent = process.sent(body(calls("x", "y"), result("y", "of b"), result("x", "of a"), HEAD[1]))
    assert ids(sent) == [["a", "b"], "b", "a", None]
    other = body(calls("x", "y"), result("x", "of a"), result("y", "of b"), HEAD[1])
    assert ids(process.sent(other)) == [["a", "b"], "a", "b", None]


def test_ids_that_change_places_within_a_batch(process: Process) -> None:
    process.sent(body(calls("a", "b"), result("a"), result("b")))
    assert ids(process.sent(body(calls("b", "a"), result("b"), result("a")))) == [["a", "b"], "a", "b"]


@pytest.mark.parametrize(
    "messages",
    [
        (calls("b", "b"), result("b"), result("b")),  # two calls of one id
        (calls("b", None), result("b")),  # a call without one
        (calls("b", ""), result("b")),
        (calls("b"), HEAD[1], result("b")),  # a result outside its round
        (calls("b"), result("x"), result("b")),
        (result("b"), calls("b"), result("b")),  # a result before its call
    ],
)
def test_what_ids_do_not_tell_is_left_alone(process: Process, messages: tuple[dict[str, Any], ...]) -> None:
    """The same conversation was sent under the id `a` before; still nothing is renamed."""
    process.sent(json.dumps({"messages": [*HEAD, *messages]}).replace('"b"', '"a"').encode())
    raw = body(*messages)
    assert process.sent(raw) == raw


def test_one_id_in_two_rounds_is_that_of_each_round(process: Process) -> None:
    """Some clients give every batch the same ids; their results follow at once."""
    process.sent(body(calls("a"), result("a"), calls("a"), result("a")))
    sent = process.sent(body(calls("b"), result("b"), calls("b"), result("b"), calls("b"), result("b")))
    assert ids(sent) == [["a"], "a", ["a"], "a", ["b"], "b"]
    sent = process.sent(body(calls("c"), result("c"), calls("c"), result("c"), calls("c"), result("c")))
    assert ids(sent) == [["a"], "a", ["a"], "a", ["b"], "b"]


def test_two_calls_never_get_one_id(process: Process) -> None:
    """Ids that two turns happened to give to different calls: the later one keeps what it came with."""
    process.sent(body(calls("a"), result("a")))
    process.sent(body(calls("b"), result("b"), calls("a"), result("a")))
    sent = process.sent(body(calls("c"), result("c"), calls("d"), result("d")))
    assert ids(sent) == [["a"], "a", ["d"], "d"]


def test_an_id_that_is_taken_is_given_to_no_other_call(process: Process) -> None:
    """A client that counts calls from the newest one: the old call keeps its new id, or two would be one."""
    process.sent(body(calls("call_0"), result("call_0")))
    raw = body(calls("call_1"), result("call_1"), calls("call_0"), result("call_0"))
    assert process.sent(raw) == raw


def test_another_conversation_keeps_its_ids(process: Process) -> None:
    process.sent(body(calls("a"), result("a")))
    for other in (
        body(HEAD[1], calls("b"), result("b")),
        body(
            {"role": "assistant", "content": None, "tool_calls": [call("b", arguments='{"a": 2}')]},
            result("b"),
        ),
        body(calls("b", "c"), result("b"), result("c")),
    ):
        assert process.sent(other) == other
    raw = body(calls("b"), result("b"))
    assert Process(process.forms, tenant="acme/beta").sent(raw) == raw
    assert process.sent(raw) == body(calls("a"), result("a"))


def test_branches_share_the_ids_of_their_common_beginning(process: Process) -> None:
    start = [calls("a"), result("a")]
    process.sent(body(calls("a")))
    process.sent(body(*start, calls("b"), result("b", "one")))
    sent = process.sent(body(calls("x"), result("x"), calls("y"), result("y", "two")))
    assert ids(sent) == [["a"], "a", ["b"], "b"]
    sent = process.sent(body(calls("x"), result("x", "another"), calls("y"), result("y")))
    assert ids(sent) == [["a"], "a", ["y"], "y"]


def test_without_the_rule_ids_pass(process: Process) -> None:
    process.policy = Policy(rules=ALL_RULES - {Rule.CALL_IDS})
    process.sent(body(calls("a"), result("a")))
    raw = body(calls("b"), result("b"))
    assert process.sent(raw) == raw


@pytest.mark.parametrize("rules", [{Rule.CALL_IDS}, {Rule.CALL_IDS, Rule.ARGUMENTS}])
def test_without_the_other_rules_only_the_ids_change(rules: set[Rule]) -> None:
    process = Process(policy=Policy(rules=frozenset(rules)))
    process.sent(body(calls("a"), result("a")))
    other = calls("b") | {"content": ""}
    assert process.sent(body(other, result("b"))) == body(calls("a") | {"content": ""}, result("a"))


def test_ids_that_never_change_cost_one_record_a_turn(process: Process) -> None:
    turns = [(calls(f"c{number}"), result(f"c{number}", str(number))) for number in range(6)]
    for count in range(1, 7):
        raw = body(*(message for turn in turns[:count] for message in turn))
        assert process.sent(raw) == raw
        # For each turn so far: the text of its calls, and the record of its ids.
        assert len(process.forms.by_key) == 2 * count
    assert process.forms.asked == 6


def test_a_client_that_makes_up_ids_leaves_no_more_behind(process: Process) -> None:
    for turn in range(1, 7):
        messages = [
            each
            for number in range(turn)
            for each in (calls(f"t{turn}-{number}"), result(f"t{turn}-{number}", str(number)))
        ]
        sent = process.sent(body(*messages))
        assert ids(sent) == [each for n in range(turn) for each in ([f"t{n + 1}-{n}"], f"t{n + 1}-{n}")]
        assert len(process.forms.by_key) == 2 * turn


def test_every_process_sends_the_same_ids() -> None:
    """Cold ones, such as forget everything, and such as have seen more or less of the conversation."""
    forms = Forms()

    def turn(mark: str, count: int) -> bytes:
        rounds = [
            (calls(f"{mark}{number}"), result(f"{mark}{number}", str(number))) for number in range(count)
        ]
        return body(*(message for each in rounds for message in each))

    fleet = [Process(forms), Process(forms), Process(forms, memory=Memory(conversations=1))]
    fleet[0].sent(turn("a", 3))
    fleet[1].sent(turn("b", 2))  # a shorter one: its ids are its own, nothing was sent with this prefix alone
    expected = [f"a{n}" for n in range(3)]
    for number, process in enumerate([*fleet, Process(forms)] * 2):
        found = ids(process.sent(turn(f"x{number}-", 3)))
        assert found[1::2] == expected
        assert [own for (own,) in found[::2]] == expected
        assert ids(process.sent(turn(f"y{number}-", 2)))[1::2] == ["b0", "b1"]
    longer = [
        ids(process.sent(turn(f"z{n}-", 5)))[1::2] for n, process in enumerate([*fleet, Process(forms)])
    ]
    assert longer == [[*expected, "z0-3", "z0-4"]] * 4


def test_a_message_that_hides_its_id_is_left_alone_with_its_round(process: Process) -> None:
    process.sent(body(calls("a"), result("a")))
    hidden = json.dumps(calls("b")).replace('"id": "b"', '"id": "long id", "id": "b"').encode()
    raw = body(calls("b"), result("b")).replace(json.dumps(calls("b")).encode(), hidden)
    sent = process.sent(raw)
    assert ids(sent) == [["a"], "a"]
    odd = body(calls("b"), result("b")).replace(
        b'"tool_call_id": "b"', b'"tool_call_id": 1, "tool_call_id": "b"'
    )
    assert json.loads(process.sent(odd)) == json.loads(body(calls("a"), result("a")))


def test_records_of_another_shape_are_not_believed(process: Process) -> None:
    process.sent(body(calls("a"), result("a")))
    for key, text in process.forms.by_key.items():
        if text.startswith(b"["):
            process.forms.by_key[key] = b'[0,[["a"],["b"]]]'
    raw = body(calls("b"), result("b"))
    assert Process(process.forms).sent(raw) == raw
