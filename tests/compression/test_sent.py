"""Outlines of prompts: what counts as an element, in which order, and where two part by their digests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ctxgate.compression.divergence import DivergenceKind as Kind
from ctxgate.compression.sent import WIDTH, Digester, Sent, common_bytes, first_difference
from ctxgate.inference import wire

SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "What is it?"}
ANSWER = {"role": "assistant", "content": "It is that."}
MORE = {"role": "user", "content": "And then?"}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fgh"]
DIGESTER = Digester(seed=7)


def sent(messages: list[dict[str, Any]], *, salt: str | None = None, **members: Any) -> Sent:
    body = wire.parse(json.dumps({"model": "m", "messages": messages, **members}).encode())
    return DIGESTER.chat(body, body.items("messages"), salt)


def difference(
    before: list[dict[str, Any]], after: list[dict[str, Any]], one: Any = None, two: Any = None
) -> tuple[Kind, str, int | None]:
    ones = sent(before, **({} if one is None else one)).outline
    twos = sent(after, **({} if two is None else two)).outline
    found = first_difference(ones, twos)
    return found.kind, found.field, found.index


def test_a_prompt_is_its_fields_then_its_tools_then_its_messages() -> None:
    found = sent([SYSTEM, ASK], tools=TOOLS)
    outline = found.outline
    assert (len(outline), outline.tools, outline.messages, outline.heads) == (5, 3, 2, 1)
    assert len(found.chain) == len(found.sizes) == 3  # the fields, the whole head, the question
    sizes = [len(json.dumps(part)) for part in (*TOOLS, SYSTEM, ASK)]
    assert list(found.sizes) == [0, sum(sizes[:4]), sizes[4]]
    assert outline.head == 4
    assert outline.size == sum(sizes)
    assert outline.message(0) == outline.digests()[3] == outline.elements[3 * WIDTH : 4 * WIDTH]
    assert outline.message(-1) == outline.digests()[4]


def test_gateways_l7_routing_b13_a_longer_prompt_keeps_the_chain_of_its_beginning() -> None:
    short, long = sent([SYSTEM, ASK], tools=TOOLS), sent([SYSTEM, ASK, ANSWER, MORE], tools=TOOLS)
    assert long.chain[: len(short.chain)] == short.chain
    assert first_difference(short.outline, long.outline).kind is Kind.EXTENDS
    assert first_difference(long.outline, short.outline).kind is Kind.EXTENDS  # nothing of it is new


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"model": "n"}, Kind.MODEL_CHANGED),
        ({"cache_salt": "s"}, Kind.SALT),
        ({"chat_template": "{{ x }}"}, Kind.TEMPLATE_CHANGED),
        ({"chat_template_kwargs": {"enable_thinking": False}}, Kind.TEMPLATE_CHANGED),
        ({"documents": []}, Kind.TEMPLATE_CHANGED),
        ({"reasoning_effort": "low"}, Kind.TEMPLATE_CHANGED),
    ],
)
def test_routing_d3_c8_what_selects_the_cache_is_the_first_link(change: dict[str, Any], kind: Kind) -> None:
    one, two = sent([SYSTEM, ASK]), sent([SYSTEM, ASK], **change)
    assert not set(one.chain) & set(two.chain)
    found = first_difference(one.outline, two.outline)
    assert (found.kind, found.field, found.index) == (kind, next(iter(change)), None)
    assert (found.kept_bytes, found.avoidable_bytes) == (0, one.outline.size)


def test_the_salt_that_goes_out_counts_not_the_clients() -> None:
    assert sent([ASK], salt="a").chain == sent([ASK], salt="a", cache_salt="b").chain
    assert sent([ASK], salt="a").chain != sent([ASK], salt="b").chain != sent([ASK]).chain


def test_members_that_reach_no_prompt_do_not_count() -> None:
    assert (
        sent([ASK], temperature=0, max_tokens=3, stream=True, tool_choice="auto").chain == sent([ASK]).chain
    )


@pytest.mark.parametrize(
    ("system", "shared"),
    [([SYSTEM], 2), ([SYSTEM | {"content": "Be long."}], 1), ([SYSTEM, SYSTEM], 1), ([], 1)],
)
@pytest.mark.parametrize("tools", [TOOLS, None])
@pytest.mark.parametrize("rounds", [1, 40])  # a long chain is made in another way
def test_equal_tools_share_nothing_unless_the_whole_head_is_equal(
    system: list[dict[str, Any]], shared: int, tools: Any, rounds: int
) -> None:
    """Templates may print the system text before the tools."""
    one = sent([SYSTEM, ASK, *[ANSWER, MORE] * rounds], tools=tools)
    two = sent([*system, MORE, *[ANSWER, MORE] * rounds], tools=tools)
    alike = [a == b for a, b in zip(one.chain, two.chain, strict=False)]
    assert alike == [True] * shared + [False] * (len(alike) - shared)
    assert len(two.chain) == len(two.sizes)
    assert sum(two.sizes) == two.outline.size


def test_a_long_chain_that_goes_on_from_a_remembered_one_is_that_of_the_whole() -> None:
    turns = [SYSTEM, ASK, *[ANSWER, MORE] * 40]
    digester = Digester(seed=7)

    def chain(count: int, by: Digester) -> tuple[bytes, ...]:
        body = wire.parse(json.dumps({"model": "m", "messages": turns[:count], "tools": TOOLS}).encode())
        return by.chat(body, body.items("messages")).chain

    grown = [chain(count, digester) for count in range(60, 82, 2)]
    assert grown == [chain(count, Digester(seed=7)) for count in range(60, 82, 2)]
    assert [len(one) for one in grown] == list(range(61, 83, 2))


def test_routing_d3_the_same_messages_with_other_tools_share_nothing_behind_the_fields() -> None:
    one, two = sent([SYSTEM, ASK], tools=TOOLS[:1]), sent([SYSTEM, ASK], tools=TOOLS[1:])
    assert one.chain[0] == two.chain[0]
    assert not set(one.chain[1:]) & set(two.chain[1:])


@pytest.mark.parametrize(
    ("one", "two", "kind", "field"),
    [
        (TOOLS, [TOOLS[0], TOOLS[2], TOOLS[1]], Kind.TOOLS_REORDERED, "tools[1]"),
        (TOOLS[:2], TOOLS, Kind.TOOLS_CHANGED, "tools[2]"),
        (TOOLS, TOOLS[:2], Kind.TOOLS_CHANGED, "tools[2]"),
        (TOOLS, TOOLS[1:], Kind.TOOLS_CHANGED, "tools[0]"),
        ([], TOOLS, Kind.TOOLS_CHANGED, "tools[0]"),
        (TOOLS, None, Kind.TOOLS_CHANGED, "tools[0]"),
    ],
)
def test_tools(one: Any, two: Any, kind: Kind, field: str) -> None:
    assert difference([ASK], [ASK], {"tools": one}, {"tools": two})[:2] == (kind, field)


OTHER = {"role": "user", "content": "Something else."}
LONG = [SYSTEM, ASK, ANSWER, MORE, ANSWER | {"content": "So."}]


@pytest.mark.parametrize(
    ("before", "after", "kind", "index"),
    [
        (LONG, [SYSTEM | {"content": "Be long."}, *LONG[1:]], Kind.SYSTEM_CHANGED, 0),
        (LONG, LONG[1:], Kind.SYSTEM_CHANGED, 0),
        (LONG, [SYSTEM, OTHER, *LONG[2:]], Kind.HISTORY_EDITED, 1),
        (LONG, [SYSTEM, ASK, OTHER, *LONG[2:]], Kind.HISTORY_EDITED, 2),  # put in between
        (LONG, [SYSTEM, ANSWER, ASK, *LONG[3:], OTHER], Kind.HISTORY_REORDERED, 1),
        (LONG, [SYSTEM, *LONG[3:], OTHER], Kind.HISTORY_TRUNCATED, 1),
        (LONG, [*LONG, OTHER], Kind.EXTENDS, None),
        (LONG, LONG[:3], Kind.EXTENDS, None),
    ],
)
def test_messages(before: Any, after: Any, kind: Kind, index: int | None) -> None:
    field = "" if index is None else f"messages[{index}]"
    assert difference(before, after) == (kind, field, index)


def test_what_stays_and_what_is_held_behind_the_difference_is_told_in_bytes() -> None:
    after = [SYSTEM, OTHER, *LONG[2:], MORE]
    found = first_difference(sent(LONG, tools=TOOLS).outline, sent(after, tools=TOOLS).outline)
    assert found.kept_bytes == sum(len(json.dumps(part)) for part in (*TOOLS, SYSTEM))
    assert found.avoidable_bytes == sum(len(json.dumps(part)) for part in LONG[2:])  # the second MORE is new


def test_a_developer_message_brings_all_system_messages_to_the_front() -> None:
    """vLLM merges them at the start, so a later one changes the head."""
    late = [{"role": "developer", "content": "Go."}, ASK, SYSTEM, MORE]
    outline = sent(late).outline
    assert (outline.order, outline.heads) == ((0, 2, 1, 3), 2)
    assert difference([late[0], ASK], late) == (Kind.SYSTEM_CHANGED, "messages[2]", 2)
    assert sent([SYSTEM, ASK, SYSTEM]).outline.order is None
    mentions = [{"role": "user", "content": 'say "developer"'}, SYSTEM]
    assert sent(mentions).outline.order is None


def test_a_completions_prompt_is_one_element() -> None:
    body = wire.parse(b'{"model":"m","prompt":"once upon"}')
    found = DIGESTER.text(body)
    assert (len(found.chain), list(found.sizes)) == (2, [0, 11])
    assert DIGESTER.text(body).chain == found.chain
    assert DIGESTER.text(wire.parse(b'{"model":"m","prompt":"once upon a"}')).chain[1] != found.chain[1]


@pytest.mark.parametrize("one", [b"", b"abc", b"abd", b"abcabc", b"\0abc", b"x" * 2_000, b"x" * 1_999 + b"y"])
@pytest.mark.parametrize("two", [b"", b"abc", b"\0", b"x" * 2_000, b"x" * 500 + b"y" * 400])
def test_leading_bytes_in_common_are_those_of_a_plain_loop(one: bytes, two: bytes) -> None:
    expected = 0
    while expected < min(len(one), len(two)) and one[expected] == two[expected]:
        expected += 1
    assert common_bytes(one, two) == expected


def test_another_seed_gives_other_digests() -> None:
    body = wire.parse(b'{"model":"m","messages":[{"role":"user","content":"x"}]}')
    chains = [Digester(seed).chat(body, body.items("messages")).chain for seed in (1, 2)]
    assert not set(chains[0]) & set(chains[1])


@pytest.mark.parametrize(
    "message",
    [b'"text"', b"[]", b'{"role":7}', b'{"role":"user","content":"\\ud83d\\ude00 \xf0\x9f\x98\x80"}'],
)
def test_messages_of_any_bytes_have_an_outline(message: bytes) -> None:
    body = wire.parse(b'{"model":"m","messages":[%s]}' % message)
    outline = DIGESTER.chat(body, body.items("messages")).outline
    assert (outline.messages, outline.heads, outline.size) == (1, 0, len(message))


def test_tools_that_are_no_array_are_one_element() -> None:
    assert sent([ASK], tools={"a": 1}).outline.tools == 1
    assert sent([ASK], tools=None).outline.tools == 0


def parts(messages: list[dict[str, Any]], at: int, **members: Any) -> tuple[bytes, ...]:
    body = wire.parse(json.dumps({"model": "m", "messages": messages, **members}).encode())
    raws = body.items("messages")
    return DIGESTER.chunks(DIGESTER.chat(body, raws), raws, at)


def system(tail: str) -> dict[str, Any]:
    return {"role": "system", "content": "x" * 3000 + tail * 1500}


def test_routing_b13_long_heads_share_whole_chunks_as_far_as_their_bytes_agree() -> None:
    one, two = parts([system("a"), ASK], 1), parts([system("b"), MORE], 1)
    assert len(one) == len(two) == 4  # 4.5 KB
    assert (one[:2], one[2] != two[2], one[3] != two[3]) == (two[:2], True, True)
    assert parts([system("a"), ASK], 1, model="n")[0] != one[0]


def test_routing_d3_system_texts_share_chunks_only_beside_the_same_tools() -> None:
    one, two = parts([system("a"), ASK], 1, tools=TOOLS), parts([system("b"), ASK], 1, tools=TOOLS)
    assert one[:2] == two[:2]
    assert not set(one) & set(parts([system("a"), ASK], 1, tools=TOOLS[:2]))
    assert not set(one) & set(parts([system("a"), ASK], 1))
    assert parts([ASK], 1, tools=TOOLS) == ()


def test_a_long_first_message_has_chunks_behind_an_equal_head() -> None:
    def ask(tail: str) -> dict[str, Any]:
        return {"role": "user", "content": "y" * 2500 + tail * 600}

    one, two = parts([SYSTEM, ask("a")], 2, tools=TOOLS), parts([SYSTEM, ask("b")], 2, tools=TOOLS)
    assert (len(one), one[:2], one[2] != two[2]) == (3, two[:2], True)
    assert not set(one) & set(parts([SYSTEM | {"content": "else"}, ask("a")], 2, tools=TOOLS))
    late = {"role": "developer", "content": "Be kind."}  # brings the system messages to the front
    moved = parts([ask("a"), SYSTEM, late], 2)
    assert moved == parts([SYSTEM, late, ask("a")], 2)


def test_the_bytes_of_each_link_are_told_alone() -> None:
    for found in (sent([SYSTEM, ASK, ANSWER], tools=TOOLS), sent([ASK, ANSWER]), sent([SYSTEM, ASK])):
        assert [found.size_of(at) for at in range(len(found.chain))] == list(found.sizes)
