"""Hidden rounds: kept under what an answer says, and put back around the message that comes back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ctxgate.compression.dialects.chat import facts_of
from ctxgate.compression.recall_tool import (
    DEFINITION,
    NAME,
    NO_ROUNDS,
    PASSAGES,
    HiddenRounds,
    ToolMemory,
    Wanted,
    call_json,
    call_message,
    decode,
    encode,
    has_tool,
    hidden,
    identity_of,
    identity_of_message,
    kept,
    put_back,
    result_message,
    wanted,
)
from ctxgate.compression.validity import Invalid, check_put_back
from support.forms import TENANT, Forms

CALL = call_json("c1", '{"query":"x"}')
BEFORE = (call_message("I look. ", ("reasoning", "Hm."), [CALL]), result_message("c1", "found"))
ROUNDS = HiddenRounds(BEFORE, "I look. ", "Hm.")


def message(content: Any, *calls: tuple[str, str], **more: Any) -> bytes:
    made = [
        {"id": f"i{at}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for at, (name, arguments) in enumerate(calls)
    ]
    document = {"role": "assistant", "content": content} | ({"tool_calls": made} if made else {}) | more
    return json.dumps(document).encode()


def loaded(texts: tuple[bytes, ...] | None) -> list[Any]:
    assert texts is not None
    return [json.loads(text) for text in texts]


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ('{"query": " a b ", "k": 3, "id": "x"}', Wanted("a b", 3, "x")),
        ('{"query": "a", "k": 99}', Wanted("a", 10)),
        ('{"query": "a", "k": -1}', Wanted("a", 1)),
        ('{"query": "a", "k": true}', Wanted("a", PASSAGES)),
        ('{"query": 3, "id": "x"}', Wanted("", PASSAGES, "x")),
        ("", None),
        ("{", None),
        ("[]", None),
        ("{}", None),
        ("[" * 100_000, None),
    ],
)
def test_arguments_are_read_as_far_as_they_go(arguments: str, found: Wanted | None) -> None:
    assert wanted(arguments) == found


def test_the_definition_is_a_tool_of_that_name() -> None:
    tool = json.loads(DEFINITION)
    assert tool["function"]["name"] == NAME
    assert set(tool["function"]["parameters"]["properties"]) == {"query", "k", "id"}


def test_a_record_is_read_as_it_was_written_and_an_unknown_one_is_none() -> None:
    rounds = HiddenRounds(BEFORE, "é", "t", ((1, CALL),), (BEFORE[1],))
    assert decode(encode(rounds)) == rounds
    assert decode(b"") == decode(b"\xff") == NO_ROUNDS
    assert decode(encode(rounds).replace(b"\x01", b"\x02", 1)) == NO_ROUNDS


def test_what_an_answer_says_is_known_again_however_a_client_sends_it() -> None:
    said = identity_of("It is. ", [("read", '{"a":1,"b":2}')])
    assert identity_of_message(message("It is. ", ("read", '{"b": 2, "a": 1}'))) == said
    assert identity_of_message(message(" It is.", ("read", '{"b":2,"a":1}'), reasoning="thought")) == said
    parts = [{"type": "text", "text": "It "}, {"type": "text", "text": "is."}]
    assert identity_of_message(message(parts, ("read", '{"b":2,"a":1}'))) == said
    assert identity_of_message(message(None)) == identity_of_message(message("")) == identity_of("", [])
    for other in (
        message("It was.", ("read", '{"a":1,"b":2}')),
        message("It is.", ("write", '{"a":1,"b":2}')),
        message("It is."),
        message("It is.", ("read", '{"a":1}')),
    ):
        assert identity_of_message(other) != said
    assert identity_of_message(message("\ud83d")) == identity_of("\ud83d", [])
    for broken in (b"[]", b"{", message("x", tool_calls=[{}]), message("x", tool_calls=[3])):
        assert identity_of_message(broken) is None


def test_what_was_said_and_thought_before_is_cut_off_the_message() -> None:
    back = loaded(put_back(message("I look. It is.", reasoning="Hm. So."), ROUNDS))
    assert back[:2] == [json.loads(each) for each in BEFORE]
    assert back[2] == {"role": "assistant", "content": "It is.", "reasoning": " So."}


def test_a_message_that_begins_otherwise_gets_nothing() -> None:
    assert put_back(message("It is."), ROUNDS) is None
    assert put_back(message(None), ROUNDS) is None
    assert put_back(message(["I look. "]), ROUNDS) is None
    assert put_back(b"[]", ROUNDS) is None


def test_a_message_of_parts_and_a_stripped_one_are_cut_too() -> None:
    parts = message([{"type": "text", "text": "I look. It is."}])
    assert loaded(put_back(parts, ROUNDS))[2]["content"] == [{"type": "text", "text": "It is."}]
    stripped = loaded(put_back(message("Look. It"), HiddenRounds(BEFORE, "\n Look. ")))
    assert stripped[2]["content"] == "It"
    called = loaded(put_back(message("I look. ", ("read", "{}")), ROUNDS))
    assert called[2]["content"] is None


def test_without_text_the_message_keeps_its_bytes() -> None:
    raw = b'{ "role": "assistant","content" : "x" }'
    texts = put_back(raw, HiddenRounds(BEFORE))
    assert texts is not None
    assert texts[2] == raw


def test_calls_beside_others_get_their_places_again() -> None:
    raw = message("x", ("read", "{}"), ("write", "{}"))
    rounds = HiddenRounds(calls=((1, CALL),), after=(BEFORE[1],))
    back = loaded(put_back(raw, rounds))
    assert [call["id"] for call in back[0]["tool_calls"]] == ["i0", "c1", "i1"]
    assert back[1]["tool_call_id"] == "c1"


def test_arguments_that_engines_refuse_are_left_out() -> None:
    for arguments in ("{", "", "[]", "3"):
        assert json.loads(call_json("c", arguments))["function"]["arguments"] == "{}"


def run(work: Any, forms: Forms) -> Any:
    try:
        ask = next(work)
        while True:
            ask = work.send(forms.take(TENANT, ask.claims, ask.reads))
    except StopIteration as end:
        return end.value


def test_who_begins_without_the_tool_goes_on_without_it() -> None:
    forms = Forms()
    assert run(has_tool(b"a" * 32, ToolMemory(), begins=True), forms)
    assert run(has_tool(b"a" * 32, ToolMemory(), begins=False), forms), "in every process"
    assert not run(has_tool(b"b" * 32, ToolMemory(), begins=False), forms)
    assert not run(has_tool(b"b" * 32, ToolMemory(), begins=True), forms)
    memory = ToolMemory()
    run(has_tool(b"a" * 32, memory, begins=True), forms)
    asked = forms.asked
    run(has_tool(b"a" * 32, memory, begins=True), forms)
    assert forms.asked == asked


def test_hidden_rounds_are_found_by_the_message_and_by_what_comes_before_it() -> None:
    forms = Forms()
    messages = [b'{"role":"user","content":"q"}', message("I look. It is.")]
    facts = [facts_of(each) for each in messages]
    hashes = [b"0" * 32, b"1" * 32]
    run(kept(hashes[0], identity_of("I look. It is.", []), ROUNDS, ToolMemory()), forms)
    assert run(hidden(messages, facts, hashes, ToolMemory()), forms) == {1: ROUNDS}
    assert run(hidden(messages, facts, [b"x" * 32, b"1" * 32], ToolMemory()), forms) == {}
    other = [messages[0], message("I look. It was.")]
    memory = ToolMemory()
    assert run(hidden(other, [facts[0], facts_of(other[1])], hashes, memory), forms) == {}
    run(kept(hashes[0], identity_of("I look. It was.", []), ROUNDS, ToolMemory()), forms)
    assert run(hidden(other, facts, hashes, ToolMemory()), forms) == {}, "that there was nothing stays"
    asked = forms.asked
    assert run(hidden(other, facts, hashes, memory), forms) == {}
    assert forms.asked == asked


def checked(before: list[bytes], after: list[bytes], places: dict[int, tuple[int, int]]) -> None:
    check_put_back([facts_of(each) for each in before], [facts_of(each) for each in after], places)


def test_the_checker_takes_only_calls_with_their_results() -> None:
    user, said = b'{"role":"user","content":"q"}', message("It is.")
    checked([user, said], [user, *BEFORE, said], {1: (2, 0)})
    checked([user], [user, *BEFORE], {0: (0, 2)})
    for after, places, reason in (
        ([user, *BEFORE], {1: (2, 0)}, "roles"),
        ([user, *BEFORE, said], {}, "messages"),
        ([user, BEFORE[0], said], {1: (1, 0)}, "pairing"),
        ([user, BEFORE[1], said], {1: (1, 0)}, "pairing"),
        ([user, user, said], {1: (1, 0)}, "roles"),
        ([user, said, said], {}, "count"),
        ([user, message("It was.")], {}, "messages"),
    ):
        with pytest.raises(Invalid) as found:
            checked([user, said], after, places)
        assert found.value.reason == reason
