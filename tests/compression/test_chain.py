"""Chain hashes name prefixes: of one tenant, in order, and by nothing but the messages."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxgate.compression.chain import Chain, Chains, chain, extended, root
from ctxgate.compression.dialects.chat import Facts, facts_of

digests = st.lists(st.binary(min_size=32, max_size=32), max_size=8)


def test_the_hash_is_what_the_module_says() -> None:
    first = blake2b(b"acme/alpha", digest_size=32, person=b"ctxgate root").digest()
    second = blake2b(first + b"d" * 32, digest_size=32, person=b"ctxgate chain").digest()
    assert root("acme/alpha") == first
    assert chain("acme/alpha", [b"d" * 32]) == [second]


@given(digests, digests)
def test_gateways_l7_a_longer_conversation_begins_with_the_hashes_of_the_shorter(
    start: list[bytes], more: list[bytes]
) -> None:
    assert chain("t", start + more)[: len(start)] == chain("t", start)


@given(digests, digests)
def test_equal_hashes_mean_equal_prefixes(one: list[bytes], two: list[bytes]) -> None:
    same = 0
    while same < min(len(one), len(two)) and one[same] == two[same]:
        same += 1
    pairs = list(zip(chain("t", one), chain("t", two), strict=False))
    assert [a == b for a, b in pairs] == [at < same for at in range(len(pairs))]


@given(digests.filter(bool))
def test_gateways_l9_tenants_share_no_hash_where_one_name_begins_another(
    messages: list[bytes],
) -> None:
    found = [set(chain(tenant, messages)) for tenant in ("acme/session-1", "acme/session-12", "acme")]
    assert len(set.union(*found)) == 3 * len(messages)
    assert extended(root("a"), b"b" * 32) != root("a")


def message(role: str, *calls: str | None, answers: str | None = None, content: str = "") -> Facts:
    document: dict[str, Any] = {"role": role, "content": content}
    if calls:
        document["tool_calls"] = [{"id": id_, "function": {"name": f"f{at}"}} for at, id_ in enumerate(calls)]
    if answers is not None:
        document["tool_call_id"] = answers
    return facts_of(json.dumps(document).encode())


def conversation(one: str, two: str, three: str) -> list[Facts]:
    return [
        message("user", content="go"),
        message("assistant", one, two),
        message("tool", answers=two),
        message("tool", answers=one),
        message("assistant", three),
        message("tool", answers=three),
    ]


def of(messages: list[Facts]) -> Chain:
    return Chains().of("t", messages)


def test_ids_do_not_count_but_which_result_answers_which_call() -> None:
    known = of(conversation("a", "b", "c"))
    assert known.batches == (1, 4)
    assert of(conversation("x", "y", "z")) == known
    assert of(conversation("b", "a", "b")) == known
    swapped = conversation("a", "b", "c")
    swapped[2:4] = reversed(swapped[2:4])
    assert of(swapped).hashes[:2] == known.hashes[:2]
    assert set(of(swapped).hashes[2:]).isdisjoint(known.hashes)


@pytest.mark.parametrize(
    "change",
    [
        {1: message("assistant", "a", "a")},
        {1: message("assistant", "a", None)},
        {1: message("assistant", "a", "")},
        {2: message("tool", answers="c")},
        {2: message("tool", answers="x")},
        {2: message("tool")},
        {3: message("user")},
        {5: message("tool", answers="a")},
    ],
)
def test_where_ids_do_not_tell_they_are_part_of_the_name(change: dict[int, Facts]) -> None:
    messages = conversation("a", "b", "c")
    other = [change.get(at, each) for at, each in enumerate(messages)]
    first = min(change)
    assert of(other).hashes[:first] == of(messages).hashes[:first]
    assert set(of(other).hashes[first:]).isdisjoint(of(messages).hashes)


def test_messages_without_ids_are_named_by_their_digests() -> None:
    messages = [
        message("system", content="s"),
        message("user", content="u"),
        message("assistant", content="a"),
    ]
    assert list(of(messages).hashes) == chain("t", [each.digest for each in messages])


pieces = st.sampled_from(
    [
        message("user"),
        message("assistant"),
        message("assistant", "a"),
        message("assistant", "a", "b"),
        message("assistant", "a", "a"),
        message("tool", answers="a"),
        message("tool", answers="b"),
        message("tool"),
    ]
)


@given(st.lists(pieces, max_size=12), st.lists(st.integers(0, 12), max_size=6))
def test_a_remembered_prefix_gives_the_same_hashes(messages: list[Facts], lengths: list[int]) -> None:
    chains = Chains(limit=60)
    for length in lengths:
        known = chains.of("t", messages[:length])
        assert known == of(messages[:length])
        assert known.hashes == of(messages).hashes[:length]
        assert chains.of("u", messages[:length]) == Chains().of("u", messages[:length])


def test_a_remembered_conversation_is_not_hashed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[bytes] = []

    def counting(previous: bytes, link: bytes) -> bytes:
        hashed.append(link)
        return extended(previous, link)

    monkeypatch.setattr("ctxgate.compression.chain.extended", counting)
    chains, messages = Chains(), conversation("a", "b", "c") * 50
    chains.of("t", messages)
    hashed.clear()
    chains.of("t", [*messages, message("user"), message("assistant")])
    assert len(hashed) == 2


def test_gateways_l10_the_order_of_keys_does_not_name_a_conversation() -> None:
    one = {"role": "assistant", "content": "x", "tool_calls": [{"id": "a", "function": {"name": "f"}}]}
    two = {"tool_calls": [{"function": {"name": "f"}, "id": "a"}], "content": "x", "role": "assistant"}
    found = [of([message("user"), facts_of(json.dumps(form).encode())]) for form in (one, two)]
    assert found[0] == found[1]


def test_context_j13_the_order_of_reasoning_is_part_of_the_name() -> None:
    said = [
        facts_of(b'{"role":"assistant","reasoning_content":"%s","content":"x"}' % r) for r in (b"1", b"2")
    ]
    assert of(said).hashes[1] != of(said[::-1]).hashes[1]


def test_a_cache_mark_that_moves_on_does_not_rename_the_conversation() -> None:
    part = {"type": "text", "text": "Go."}
    marked = {"role": "user", "content": [part | {"cache_control": {"type": "ephemeral"}}]}
    plain = {"role": "user", "content": [part]}
    on_message = {"role": "user", "content": [part], "cache_control": {"type": "ephemeral"}}
    links = [[facts_of(json.dumps(each).encode())] for each in (marked, plain, on_message)]
    assert len({Chains().of("acme/alpha", facts).hashes for facts in links}) == 1
    assert len({facts[0].digest for facts in links}) == 3  # none of them is sent for another


def test_a_chain_in_pieces_is_the_same_chain() -> None:
    rounds = 1500
    facts = [facts_of(b'{"role":"user","content":"port it"}')]
    for number in range(rounds):
        call = {"id": f"c{number}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        facts.append(facts_of(json.dumps({"role": "assistant", "tool_calls": [call]}).encode()))
        facts.append(
            facts_of(json.dumps({"role": "tool", "tool_call_id": f"c{number}", "content": "x"}).encode())
        )
    chains = Chains()
    assert len(list(chains.in_pieces("t", facts))) == 3, "pieces of 1,024 messages"
    assert list(chains.in_pieces("t", facts)) == [], "it is known now"
    assert chains.of("t", facts) == Chains().of("t", facts)
    assert list(chains.in_pieces("t", facts[:100])) == [], "short ones are done at once"
    grown = [*facts, facts_of(b'{"role":"user","content":"on"}')]
    assert list(chains.in_pieces("t", grown)) == [], "all but one message is known"
