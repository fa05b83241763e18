"""What is said of a miss does not depend on whether bodies were compared, only what it costs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxgate.compression.bounds import at_most, says_something_else
from ctxgate.compression.diff_parts import difference_of_messages
from ctxgate.compression.diverge import diverge
from ctxgate.compression.sent import Digester
from ctxgate.gateway import misses as misses_module
from ctxgate.inference import wire
from ctxgate.inference.oracle import PrefixOracle
from support.following import BLOCK, Answered, Follower

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ctxgate.compression.divergence import Divergence

DIGESTER = Digester(seed=7)
TOOLS = (
    '[{"type":"function","function":{"name":"f"}}]',
    '[{"type": "function", "function":{"name":"f"}}]',
)
PLACES = (("standard", "standard-0"), ("standard", "standard-1"))
texts = st.sampled_from(
    ["", "a", 'quo"te', "\u00e9", "x" * 40, "word " * 30, "word " * 29 + "end", "9 word " * 90]
)
arguments = st.sampled_from(
    ['{"a":1,"b":2}', '{"a": 1, "b": 2}', '{"b":2,"a":1}', '{"a":1.0,"b":2}', '{"a":2,"b":2}', "no json"]
)


@st.composite
def messages(draw: st.DrawFn) -> dict[str, Any]:
    role = draw(st.sampled_from(["system", "user", "assistant", "assistant", "tool"]))
    text = draw(texts)
    content = draw(st.sampled_from([text, text, text, [{"type": "text", "text": text}], None]))
    message: dict[str, Any] = {"role": role, "content": content}
    if role == "assistant" and draw(st.booleans()):
        names = draw(st.lists(st.sampled_from(["f", "g"]), max_size=2))
        message["tool_calls"] = [
            {"id": f"c{at}", "type": "function", "function": {"name": name, "arguments": draw(arguments)}}
            for at, name in enumerate(names)
        ]
    return message | draw(st.sampled_from([{}, {}, {"cache_control": {"type": "ephemeral"}}, {"name": "n"}]))


def spelled(message: dict[str, Any], spelling: int) -> str:
    """The same message in one of several spellings."""
    if spelling == 1:
        return json.dumps(message, ensure_ascii=False, separators=(",", ":"))
    if spelling == 2:
        return json.dumps(dict(reversed(message.items())))
    return json.dumps(message)


@st.composite
def histories(draw: st.DrawFn) -> list[list[str]]:
    """Requests of one conversation: it grows, and its client edits, respells, drops and moves messages."""
    current = draw(st.lists(messages(), min_size=2, max_size=7))
    spellings = [0] * len(current)
    turns = []
    for _ in range(draw(st.integers(2, 4))):
        turns.append([spelled(*each) for each in zip(current, spellings, strict=True)])
        for _ in range(draw(st.integers(0, 2))):
            at = draw(st.sampled_from([0, len(current) - 1, *range(len(current))]))
            match draw(st.sampled_from(["edit", "spell", "insert", "drop", "swap"])):
                case "edit":
                    current[at] = draw(messages())
                case "spell":
                    spellings[at] = draw(st.integers(0, 2))
                case "insert":
                    current.insert(at, draw(messages()))
                    spellings.insert(at, 0)
                case "drop" if len(current) > 1:
                    del current[at], spellings[at]
                case _:
                    current[at], current[-1] = current[-1], current[at]
        added = draw(st.lists(messages(), max_size=2))
        current, spellings = [*current, *added], [*spellings, *[0] * len(added)]
    return turns


def body_of(turn: Sequence[str], tools: str = "null") -> bytes:
    return f'{{"model":"m","tools":{tools},"messages":[{",".join(turn)}]}}'.encode()


@given(messages(), messages(), st.integers(0, 2))
def test_what_certainly_differs_differs_in_meaning_and_reaches_the_prompt(
    one: dict[str, Any], two: dict[str, Any], spelling: int
) -> None:
    first = wire.parse(body_of([spelled(one, 0)])).items("messages")[0]
    second = wire.parse(body_of([spelled(two, spelling)])).items("messages")[0]
    if says_something_else(first, second):
        found = difference_of_messages(first, second)
        assert found.meaning
        assert found.rendered
    assert not says_something_else(first, wire.parse(body_of([spelled(one, spelling)])).items("messages")[0])


def test_texts_and_calls_that_differ_are_told() -> None:
    def told(one: dict[str, Any], two: dict[str, Any]) -> bool:
        ones, twos = (wire.parse(body_of([json.dumps(each)])).items("messages") for each in (one, two))
        return says_something_else(ones[0], twos[0])

    def call(text: str) -> dict[str, Any]:
        return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": text}}]}

    assert told({"role": "user", "content": "a"}, {"role": "user", "content": "b"})
    assert told(call('{"a":1}'), call('{"a":2}'))
    assert not told(call('{"a":1}'), call('{"a": 1}'))
    assert not told({"role": "user", "content": "a"}, {"role": "user", "content": "a", "name": "n"})


@given(histories())
def test_a_bound_holds_what_an_exact_comparison_finds(turns: list[list[str]]) -> None:
    before, after = wire.parse(body_of(turns[0])), wire.parse(body_of(turns[-1]))
    one, two = (DIGESTER.chat(body, body.items("messages")).outline for body in (before, after))
    most = at_most(before, after, one, two)
    if most is not None:
        exact = diverge(before, after, rendered_only=True)
        assert exact.rendered
        assert (exact.index, exact.offset, exact.kept_bytes) == (most.index, most.offset, most.kept_bytes)
        assert exact.avoidable_bytes <= most.avoidable_bytes
        assert exact.field.split(".")[0] == most.field


class _Forgetful(PrefixOracle):
    """An engine that has at most so many tokens of each prompt left."""

    def __init__(self, left: list[int]) -> None:
        super().__init__(BLOCK)
        self._left = left

    def observe(self, tokens: Sequence[int], domain: str = "") -> int:
        return min(super().observe(tokens, domain=domain), self._left.pop(0)) // BLOCK * BLOCK


@given(histories(), st.data())
def test_the_verdict_is_that_of_an_exact_comparison(turns: list[list[str]], data: st.DataObject) -> None:
    left = data.draw(st.lists(st.sampled_from([0, 32, 10_000, 10_000]), min_size=4, max_size=4))
    places = data.draw(st.lists(st.sampled_from([PLACES[0], *PLACES]), min_size=4, max_size=4))
    tools = data.draw(st.lists(st.sampled_from(["null", *TOOLS]), min_size=4, max_size=4))

    def played() -> list[Answered]:
        follower = Follower(engine=_Forgetful([*left]))
        return [
            follower.send(body_of(turn, tool), place=place)
            for turn, tool, place in zip(turns, tools, places, strict=False)
        ]

    cheap = played()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(misses_module, "at_most", lambda *_: None)
        patched.setattr(misses_module, "bounded", lambda *_: None)
        patched.setattr(misses_module.Misses, "_is_fulfilled", lambda *_: False)
        assert cheap == played()


def test_bodies_are_compared_only_where_a_miss_hangs_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    exact = misses_module._difference

    def counted(before: wire.Body, after: wire.Body) -> Divergence:
        compared.append(len(after.raw))
        return exact(before, after)

    monkeypatch.setattr(misses_module, "_difference", counted)
    said = [{"role": role, "content": f"{role} " * 90} for role in ("system", "user", "assistant")]
    follower = Follower()
    for number in range(4):  # the last message says something else in every request
        last = {"role": "user", "content": f"{number} of them"}
        assert follower.send(body_of([json.dumps(each) for each in (*said, last)])).miss is None
    assert compared == []
    body = body_of([json.dumps(each) for each in ({"role": "system", "content": "Be brief."}, *said[1:])])
    assert follower.send(body).miss is not None
    assert compared == [len(body)]
