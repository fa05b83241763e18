"""Shrunk results and exact strings over generated texts, and what survives of real sessions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ctxgate.compression.clusters import is_border
from ctxgate.compression.extractive import extract
from ctxgate.compression.identifiers import (
    Identifier,
    IdentifierKind,
    block,
    collected,
    estimated_tokens,
    found_in,
)
from ctxgate.compression.said import Said, read_said, repaired
from ctxgate.compression.structure import Kind
from ctxgate.compression.summary import fault_of, rendered
from ctxgate.compression.tool_output import shrink, split_oversize

pytestmark = pytest.mark.integration

TRAJECTORIES = Path(__file__).parents[3] / "shared" / "trajectories"
SESSIONS = sorted(TRAJECTORIES.glob("*.jsonl"))
here = pytest.mark.skipif(not SESSIONS, reason="the recorded sessions lie outside the repository")
ID = "ctx_0123456789abcdef"

any_text = st.text(alphabet=st.characters(codec=None, categories=None), max_size=60)
joined = st.lists(
    st.sampled_from(
        ["\U0001f468\u200d\U0001f469", "e\u0301", "\U0001f1e9\U0001f1ea", "\r\n", "\ud83d", "x" * 90]
    )
    | any_text,
    max_size=60,
).map("\n".join)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=300),
    lambda inner: st.lists(inner, max_size=30) | st.dictionaries(st.text(max_size=20), inner, max_size=12),
    max_leaves=80,
)


def size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


@settings(deadline=None, max_examples=150)
@given(joined, st.integers(0, 3000))
@example("\ud83d" * 2000, 500)
def test_context_r1_shrunk_texts_are_short_and_well_formed(text: str, limit: int) -> None:
    short = shrink(text, limit, ID)
    assert shrink(text, limit, ID) == short
    assert size(short.text) <= size(text)
    if short.left_out:
        short.text.encode()
        assert size(short.text) <= max(limit, 400 + len(ID))
        assert ID in short.text
    else:
        assert short.text == text


@settings(deadline=None, max_examples=40)
@given(values, st.integers(500, 3000))
def test_json_stays_json(value: object, limit: int) -> None:
    text = json.dumps([value, {"error": "last"}], ensure_ascii=False)
    short = shrink(text, limit, ID)
    if short.left_out:
        assert short.kind is Kind.JSON
        assert isinstance(json.loads(short.text), list)
        assert size(short.text) <= limit


@settings(deadline=None, max_examples=100)
@given(joined, st.integers(200, 3000))
def test_a_split_message_keeps_both_ends_whole(text: str, limit: int) -> None:
    text = text.replace("\ud83d", "")
    out = split_oversize(text, limit, ID)
    if out == text:
        return
    assert size(out) <= limit
    head, _, tail = out.partition("\n[Shortened by the gateway:")
    tail = tail.partition("]\n")[2]
    assert text.startswith(head)
    assert text.endswith(tail)
    assert is_border(text, len(head))
    assert is_border(text, len(text) - len(tail))


@settings(deadline=None, max_examples=100)
@given(st.lists(joined, max_size=6), st.integers(50, 1500))
def test_exact_strings_stand_in_their_messages_and_fit_the_budget(texts: list[str], budget: int) -> None:
    said = [Said(("user", "tool", "assistant")[at % 3], repaired(text)[0]) for at, text in enumerate(texts)]
    found = [found_in(message) for message in said]
    for message, strings in zip(said, found, strict=True):
        for each in strings:
            assert each.text.split(": ", 1)[-1] in message.text or each.text in message.text
    every = collected(enumerate(found))
    assert every == collected(enumerate(found))
    out = block(every, budget)
    rules = "".join(f"- {each.text}\n" for each in every if each.kind is IdentifierKind.RULE)
    assert estimated_tokens(out.text) <= max(budget, estimated_tokens(rules) + 120)


@settings(deadline=None, max_examples=60)
@given(st.lists(joined, min_size=1, max_size=8), st.integers(60, 800))
def test_extracts_are_usable_records(texts: list[str], budget: int) -> None:
    said = [Said(("user", "assistant", "tool")[at % 3], repaired(text)[0]) for at, text in enumerate(texts)]
    found = extract(said, budget)
    if found is not None:
        assert fault_of(rendered(found), 10**9) is None
        assert extract(said, budget) == found


def messages_of(path: Path) -> list[Said]:
    return [read_said(line) for line in path.read_bytes().splitlines()[1:]]


def written(every: list[Identifier], text: str, kind: IdentifierKind, *, told: bool) -> float:
    """The share of the strings of a kind that stand in a block."""
    wanted = [each.text for each in every if each.kind is kind and (each.told or not told)]
    return sum(each.replace("\n", "\n  ") in text for each in wanted) / len(wanted)


@here
def test_context_e2_all_rules_and_most_named_paths_of_a_long_session_survive() -> None:
    """Over a dropped range of 840 messages, in the block alone and without any recall."""
    said = messages_of(TRAJECTORIES / "coding-long-a.jsonl")
    every = collected((at, found_in(said[at])) for at in range(2, 844))
    for budget, paths in ((500, 0.0), (2000, 0.3), (4000, 0.6), (8000, 0.9)):
        text = block(every, budget).text
        assert written(every, text, IdentifierKind.RULE, told=True) == 1
        assert written(every, text, IdentifierKind.PATH, told=True) >= paths
        assert estimated_tokens(text) <= max(budget, 1100)


@here
def test_what_later_requests_name_is_mostly_in_a_block_of_4000_tokens() -> None:
    """At cuts every 60 messages: strings of the next 60 that stand in what was dropped, not in the tail."""
    said = messages_of(TRAJECTORIES / "coding-long-a.jsonl")
    found = [found_in(message) for message in said]
    texts = ["\n".join([message.text, *(call.arguments for call in message.calls)]) for message in said]
    named = kept = 0
    for now in range(150, len(said) - 40, 60):
        every = collected((at, found[at]) for at in range(2, now - 20))
        known = {(each.kind, each.text) for each in every}
        text = block(every, 4000).text
        tail = "\n".join([*texts[:2], *texts[now - 20 : now]])
        later = {
            (each.kind, each.text)
            for at in range(now, min(now + 60, len(said)))
            if said[at].role == "assistant"
            for each in found[at]
        }
        for _, string in later & known:
            if string not in tail:
                named += 1
                kept += string.replace("\n", "\n  ") in text
    assert named > 200
    assert kept / named >= 0.85


@here
@pytest.mark.parametrize("limit", [600, 2000, 8000])
def test_every_recorded_result_shrinks_within_its_limit(limit: int) -> None:
    for path in SESSIONS:
        for message in messages_of(path):
            if message.role != "tool":
                continue
            short = shrink(message.text, limit, ID)
            assert size(short.text) <= max(limit, 0) or not short.left_out
            assert size(short.text) <= size(message.text)
            if short.left_out and short.kind is Kind.JSON:
                json.loads(short.text)
