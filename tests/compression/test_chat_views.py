"""Which messages and tools are the same, which are not, and where rounds begin and end."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ctxgate.compression.dialects import chat
from ctxgate.compression.dialects.chat import Facts, Round, Views, facts_of, named, rounds, tool_facts_of


def call(arguments: Any = '{"a":1,"b":[2]}', **changes: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}} | changes


def assistant(*calls: dict[str, Any], **members: Any) -> bytes:
    return json.dumps({"role": "assistant", "content": None, "tool_calls": list(calls)} | members).encode()


def digest(raw: bytes) -> bytes:
    return facts_of(raw).digest


BASE = assistant(call())


@pytest.mark.parametrize(
    "raw",
    [
        BASE,
        b" " + BASE.replace(b", ", b" ,\n"),
        assistant(call(), content=""),
        assistant(call(), name=None, refusal=None, audio=None),
        json.dumps({"tool_calls": [call()], "role": "assistant"}).encode(),
        assistant(call('{ "b" : [ 2 ] , "a" : 1 }')),
        assistant(call('{"b":[2],"\\u0061":1}')),
        assistant(call(index=None)),
        BASE.replace(b"assistant", b"\\u0061ssistant"),
    ],
)
def test_forms_of_one_message(raw: bytes) -> None:
    facts = facts_of(raw)
    assert facts == facts_of(BASE)
    assert (facts.role, facts.varies, facts.calls, facts.answers) == ("assistant", True, ("c1",), None)


def test_the_spelling_is_known_beside_the_identity() -> None:
    """What the rules for arguments and for empty content unify, each by itself."""
    null, empty, missing = BASE, assistant(call(), content=""), BASE.replace(b'"content": null, ', b"")
    spaced = assistant(call('{ "a":1, "b":[2] }'))
    contents = [facts_of(raw).content for raw in (null, empty, missing, assistant(call(), content="x"))]
    assert len(set(contents)) == 4
    assert contents[3] == b""
    assert len({facts_of(raw).arguments for raw in (null, empty, missing)}) == 1
    assert facts_of(spaced).arguments != facts_of(null).arguments
    assert facts_of(spaced).content == facts_of(null).content


def test_the_shape_is_the_identity_without_ids() -> None:
    one, two = (
        facts_of(assistant(call(id="a"), call(id="b"))),
        facts_of(assistant(call(id="x"), call(id="x"))),
    )
    assert one.shape == two.shape == one.nameless != one.digest != two.digest
    assert named(one.shape, ("x", "x")) == two.digest
    assert facts_of(BASE).shape != one.shape
    answers = [facts_of(b'{"role":"tool","tool_call_id":"%s","content":"x"}' % id_) for id_ in (b"a", b"b")]
    assert answers[0].shape == answers[1].shape
    assert answers[0].digest != answers[1].digest
    nameless = facts_of(b'{"role":"user","content":"x"}')
    assert (nameless.shape, nameless.nameless) == (b"", nameless.digest)


def test_an_id_that_is_no_text_stays_in_the_shape() -> None:
    forms: list[Any] = [{"id": 1}, {"id": 2}, {"id": None}, {"id": ""}, {"id": "1"}, {"id": [None]}]
    digests = {digest(assistant(call(**form))) for form in forms}
    assert len(digests) == len(forms)
    assert facts_of(assistant(call(id=None))) == facts_of(BASE.replace(b'"id": "c1", ', b""))
    assert facts_of(assistant(call(id=1))).shape != facts_of(assistant(call(id=2))).shape


OTHERS = [
    assistant(call('{"a":1,"b":[2.0]}')),
    assistant(call('{"a":1,"b":[2],"c":null}')),  # a null argument is an argument
    assistant(call('{"a":1,"b":[2]')),  # no JSON
    assistant(call({"a": 1, "b": [2]})),  # a value, not a text
    assistant(call([{"a": 1, "b": [2]}])),
    assistant(call('[{"a":1,"b":[2]}]')),
    assistant(call(id="c2")),
    assistant(call(), call()),
    assistant(call(), content="text"),
    assistant(call(), content=" "),
    assistant(call(), content=[]),
    assistant(call(), reasoning_content="because"),
    assistant(call(), reasoning_content=""),
    BASE.replace(b"assistant", b"tool"),
    BASE + b"!",
]


def test_other_messages_are_other_messages() -> None:
    found = {digest(raw) for raw in [BASE, *OTHERS]}
    assert len(found) == 1 + len(OTHERS)


def test_arguments_that_are_no_json_are_texts() -> None:
    one, two = assistant(call("{broken")), assistant(call("{ broken"))
    assert digest(one) != digest(two)
    assert digest(one) == digest(one.replace(b", ", b","))
    assert digest(assistant(call('{"a": NaN}'))) != digest(assistant(call('{"a":NaN}')))


def test_without_calls_the_forms_of_empty_content_are_kept_apart() -> None:
    """An engine may refuse one of them: it must not take the place of one that works."""
    nothing: list[dict[str, Any]] = [{}, {"content": None, "tool_calls": []}, {"tool_calls": None}]
    forms = [{"content": ""}, *nothing]
    facts = [facts_of(json.dumps({"role": "assistant"} | form).encode()) for form in forms]
    assert facts[0].digest != facts[1].digest
    assert facts[1] == facts[2] == facts[3]
    assert not any(each.varies for each in facts)


def test_the_size_is_that_of_what_is_said() -> None:
    sizes = [facts_of(b'{"role":"user","content":"%s"}' % text).size for text in (b"a", b"aaa", b"\\u0061")]
    assert sizes == [sizes[0], sizes[0] + 2, sizes[0]]


def test_only_messages_with_calls_vary() -> None:
    messages = [
        {"role": "user", "content": ""},
        {"role": "tool", "tool_call_id": "c1", "content": '{"a": 1}'},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "x", "tool_calls": [call()]},
    ]
    facts = [facts_of(json.dumps(message).encode()) for message in messages]
    assert [each.varies for each in facts] == [False] * 4
    assert [each.answers for each in facts] == [None, "c1", None, None]


@pytest.mark.parametrize(
    "raw",
    [
        b'{"role":"assistant","tool_calls":5}',
        b'{"role":"assistant","tool_calls":[5]}',
        b'{"role":"assistant","tool_calls":[{"function":[]}]}',
        b'{"role":"user","content":"\xff"}',
        b'{"role":"user","content":' + b"[" * 300 + b"]" * 300 + b"}",
        b'{"role":"assistant","tool_calls":[{"function":{"arguments":' + b"[" * 500 + b"]" * 500 + b"}}]}",
    ],
)
def test_what_cannot_be_read_equals_only_itself(raw: bytes) -> None:
    facts = facts_of(raw)
    assert facts == Facts(facts.digest, len(raw), "")
    assert digest(raw.replace(b":", b": ", 1)) != facts.digest


def tool(**function: Any) -> bytes:
    return json.dumps({"type": "function", "function": {"name": "f"} | function}).encode()


def test_tools_are_equal_as_json_and_nulls_of_their_wrapper_do_not_count() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"default": None}}}
    turned = {"properties": {"b": {"default": None}, "a": {"type": "string"}}, "type": "object"}
    other = {"type": "object", "properties": {"a": {"type": "string"}, "b": {}}}
    base = tool_facts_of(tool(parameters=schema))
    assert base is not None
    assert base.name == "f"
    assert tool_facts_of(tool(description=None, parameters=turned)) == base
    assert tool_facts_of(tool(parameters=other)) != base
    assert tool_facts_of(tool(parameters=schema, description="")) != base
    assert tool_facts_of(b'{"name":"builtin","type":"x"}') not in (None, base)
    for broken in (b"[]", b"5", b'{"function":5}', b'{"function":{"name":"\xff"}}'):
        assert tool_facts_of(broken) is None


def test_a_message_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[bytes] = []

    def counting(raw: bytes) -> Facts:
        decoded.append(raw)
        return facts_of(raw)

    monkeypatch.setattr(chat, "facts_of", counting)
    views = Views()
    for _ in range(3):
        assert views.message("t", BASE) == facts_of(BASE)
    views.message("other", BASE)
    assert decoded == [BASE, BASE]  # once per tenant


def facts(role: str, *calls: str, answers: str | None = None) -> Facts:
    return Facts(b"", 0, role, bool(calls), calls, answers)


def test_context_b_rounds_hold_every_result_of_their_batch() -> None:
    """A batch is whole in any order of its results; what is no result of it ends the round."""
    conversation = [
        facts("system"),
        facts("user"),
        facts("assistant", "a", "b"),
        facts("tool", answers="b"),
        facts("tool", answers="a"),
        facts("assistant", "c"),
        facts("user"),
        facts("tool", answers="c"),
        facts("assistant"),
        facts("assistant", "d"),
        facts("tool", answers="x"),
    ]
    assert rounds(conversation) == [Round(2, 5), Round(5, 6), Round(8, 9), Round(9, 10)]
