"""How long prompts may be and are: windows, tokenizers, estimates, and the terms of a decision."""

from __future__ import annotations

import json
from datetime import date
from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.compression.compaction import Compaction
from ctxgate.compression.dialects.chat import facts_of
from ctxgate.compression.window import Conversation
from ctxgate.gateway.config import Context, Model, Pool, Replica, Tokenizer
from ctxgate.gateway.context_lengths import LEARNED_FOR_US, Tokenizers, Windows
from ctxgate.gateway.context_sizes import Estimate, Lengths
from ctxgate.gateway.context_terms import Known, Needs, asked_output, state_before, terms_of
from ctxgate.gateway.fleet import Fleet
from ctxgate.inference import wire
from ctxgate.inference.finding import Finding
from ctxgate.inference.lengths import Measure
from ctxgate.inference.probe import Probe
from ctxgate.inference.prompts import TINY, PromptRenderer
from ctxgate.inference.rates import RateCard, Rates

if TYPE_CHECKING:
    from pathlib import Path

DAY = date(2026, 1, 1)
BASE = Rates(10**9, 10**8, 2 * 10**9, 10**9, DAY)
TIER = Rates(2 * 10**9, 2 * 10**8, 4 * 10**9, 2 * 10**9, DAY, above_prompt_tokens=200_000)
REPLICAS = (Replica("a", "http://a"), Replica("b", "http://b"))
POOL = Pool("standard", REPLICAS, RateCard(((BASE,),)))
NOW_US = 1_780_000_000_000_000


def test_context_i1_of_the_configuration_or_the_reports_and_the_engine_s_own_word_the_least_counts() -> None:
    fleet = Fleet({"standard": POOL})
    plain, stated = Model("m", ("standard",)), Model("n", ("standard",), window=5000)
    windows = Windows(fleet, {})
    assert windows.of(POOL, plain) is None
    fleet.record("standard", "a").windows = {"m": 9000, "n": 9000}
    fleet.record("standard", "b").windows = {"m": 8000}
    assert (windows.of(POOL, plain), windows.of(POOL, stated)) == (8000, 5000)
    windows.learn(POOL, "a", plain, 7000)
    windows.learn(POOL, "a", stated, 7000)
    assert (windows.of(POOL, plain), windows.of(POOL, stated)) == (7000, 5000)


def test_a_learned_window_is_given_up_when_the_replica_is_another_or_takes_more() -> None:
    now_us = 1
    fleet = Fleet({"standard": POOL}, lambda: now_us)
    model = Model("m", ("standard",), window=50_000)
    windows = Windows(fleet, {})
    well = Probe(Finding.WELL, {"m": 4096})
    fleet.probed("standard", "a", well)
    record = fleet.record("standard", "a")

    def learned() -> int | None:
        windows.learn(POOL, "a", model, 4096)
        fleet.probed("standard", "a", well)  # the same report again says nothing new
        windows.took(POOL, "a", model, 4096)
        windows.took(POOL, "b", model, 9000)
        return windows.of(POOL, model)

    assert learned() == 4096
    windows.took(POOL, "a", model, 4097)
    assert windows.of(POOL, model) == 50_000

    assert learned() == 4096
    fleet.probed("standard", "a", Probe(Finding.WELL, {"m": 50_000}))
    assert windows.of(POOL, model) == 50_000
    fleet.probed("standard", "a", well)

    assert learned() == 4096
    fleet.probed("standard", "a", Probe(Finding.UNWELL))
    assert (record.started, windows.of(POOL, model)) == (1, 50_000)
    fleet.probed("standard", "a", well)

    assert learned() == 4096
    now_us += LEARNED_FOR_US
    assert windows.of(POOL, model) == 4096
    now_us += 1
    assert windows.of(POOL, model) == 50_000


def test_context_i1_an_unknown_window_is_said_once_for_each_pool_and_model(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fleet = Fleet({"standard": POOL})
    windows, names = Windows(fleet, {}), ("m", "n")
    models = [Model(name, ("standard",)) for name in names]
    stated = Model("o", ("standard",), window=5000)
    assert [windows.of(POOL, model) for model in models] == [None, None]
    assert not caplog.records, "no replica was asked yet"
    fleet.probed("standard", "a", Probe(Finding.UNWELL))
    assert windows.of(POOL, models[0]) is None
    assert not caplog.records
    fleet.probed("standard", "a", Probe(Finding.WELL, {"n": None}))
    for _ in range(2):
        assert [windows.of(POOL, model) for model in (*models, stated)] == [None, None, 5000]
    assert [record.message for record in caplog.records] == [
        f"pool standard, model {name}: the window is not known, so a prompt is shortened for it only once an "
        f"engine has refused one (models.{name}.window states it)"
        for name in names
    ]
    fleet.probed("standard", "b", Probe(Finding.WELL, {"m": 4096}))
    assert windows.of(POOL, models[0]) == 4096


MESSAGES = [
    json.dumps(message).encode()
    for message in (
        {"role": "user", "content": "Port the billing service."},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "function": {"name": "bash", "arguments": '{"command": "make"}'}}],
        },
    )
]
FACTS = [facts_of(raw) for raw in MESSAGES]


async def test_a_tokenizer_file_counts_what_messages_say() -> None:
    model = Model("m", ("standard",), tokenizer=Tokenizer(file=TINY / "tokenizer.json"))
    tokenizer = PromptRenderer().tokenizer
    said = ["Port the billing service.", 'bash{"command": "make"}']
    expected = sum(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in said)
    found = await Tokenizers().count(model, FACTS, MESSAGES)
    assert found == expected + 2 * 6  # a few around each message


async def test_context_g11_a_tokenizer_counts_reasoning_that_is_sent_back() -> None:
    model = Model("m", ("standard",), tokenizer=Tokenizer(file=TINY / "tokenizer.json"))
    tokenizer = PromptRenderer().tokenizer
    thought, answer = "The lease is read by two of the callers. " * 30, "Done."

    async def count(**more: Any) -> int | None:
        raw = json.dumps({"role": "assistant", "content": answer, **more}).encode()
        return await Tokenizers().count(model, [facts_of(raw)], [raw])

    plain = len(tokenizer.encode(answer, add_special_tokens=False).ids) + 6
    expected = plain + len(tokenizer.encode(thought, add_special_tokens=False).ids)
    assert await count() == await count(reasoning_content=None) == plain
    assert await count(reasoning_content=thought) == await count(reasoning=thought) == expected
    assert await count(reasoning_content=thought, reasoning=thought) == expected, "said twice, printed once"
    assert await count(reasoning_content="\ud800", reasoning=["a"]) == plain


@pytest.mark.parametrize("tokenizer", [Tokenizer(tiktoken="no_such_encoding"), None])
async def test_without_a_usable_tokenizer_there_is_no_count(tokenizer: Tokenizer | None) -> None:
    tokenizers = Tokenizers()
    model = Model("m", ("standard",), tokenizer=tokenizer)
    assert await tokenizers.count(model, FACTS, MESSAGES) is None
    assert await tokenizers.count(model, FACTS, MESSAGES) is None


async def test_a_broken_tokenizer_file_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "t.json").write_text("{}")
    model = Model("m", ("standard",), tokenizer=Tokenizer(file=tmp_path / "t.json"))
    tokenizers = Tokenizers()
    for _ in range(2):
        assert await tokenizers.count(model, FACTS, MESSAGES) is None
    assert [record.message for record in caplog.records] == [
        "model m: its tokenizer cannot be used: Exception"
    ]


def test_sizes_are_remembered_and_calibrated_per_model() -> None:
    lengths = Lengths()
    first = lengths.sizes(FACTS, MESSAGES)
    assert first == [Measure(len(raw), 0) for raw in MESSAGES]
    assert lengths.sizes(FACTS, [b"", b""]) == first
    lengths.learn("m", Measure(3000, 0), 1000)
    assert (lengths.of("m").tokens(Measure(300, 0)), lengths.of("n").tokens(Measure(300, 0))) == (100, 75)


def test_an_estimate_is_near_an_edge_on_both_sides() -> None:
    estimate = Estimate(1000, 30)
    assert [edge for edge in (960, 970, 1000, 1030, 1040) if estimate.is_near(edge)] == [970, 1000, 1030]


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 7}, 7),
        ({"max_tokens": None, "max_completion_tokens": None}, None),
        ({"max_tokens": -1}, None),
        ({"max_tokens": "many"}, None),
        ({"max_tokens": 1.5}, None),
    ],
)
def test_the_answer_that_is_asked_for(members: dict[str, Any], expected: int | None) -> None:
    assert asked_output(wire.parse(json.dumps(members).encode())) == expected


def known(tokens: int, **more: Any) -> Known:
    return Known(3, tokens, Measure(tokens * 4, 0), None, Conversation(base=10, tokens=tokens), **more)


def test_in_line_the_answer_must_fit_and_in_the_background_a_batch_and_a_summary_too() -> None:
    context, needs = Context(summary_tokens=800), Needs(1000, 2000, 100_000)
    before = known(50_000, largest=700, batch=3000)
    inline = terms_of(context, POOL, needs, before, now_us=NOW_US, background=False)
    behind = terms_of(context, POOL, needs, before, now_us=NOW_US, background=True)
    assert inline.limits.window_trigger() == 98_000
    assert behind.limits.window_trigger() == 98_000 - 3000 - (800 * 11 // 8 + 400)
    free = terms_of(Context(summarizer="extractive"), POOL, needs, before, now_us=NOW_US, background=True)
    assert (free.shape.summary_output, free.limits.window_trigger()) == (0, 95_000)


def test_context_f10_an_answer_of_unknown_length_gets_an_eighth_of_a_small_window() -> None:
    for window, output in ((8000, 1000), (16_384, 2048), (100_000, 4096)):
        needs = Needs(100, None, window)
        terms = terms_of(Context(), POOL, needs, None, now_us=NOW_US, background=False)
        assert terms.limits.window_trigger() == window - output


def test_the_next_price_tier_bounds_a_prompt() -> None:
    pool = Pool("standard", REPLICAS, RateCard(((BASE, TIER),)))
    needs = Needs(100, 10, None)
    terms = terms_of(Context(), pool, needs, known(1000, batch=500), now_us=NOW_US, background=True)
    assert (terms.limits.tier_edge, terms.limits.tier_trigger()) == (200_000, 200_000 - 4000 - 500)
    assert terms.rates == BASE
    dear = terms_of(Context(), pool, needs, known(200_001), now_us=NOW_US, background=False)
    assert (dear.rates, dear.limits.tier_trigger()) == (TIER, 200_000)


def test_a_record_of_another_process_is_a_compaction_in_between() -> None:
    terms = terms_of(Context(), POOL, Needs(100, 10, 100_000), None, now_us=NOW_US, background=False)
    record = Compaction(b"a" * 32, 3)
    before = known(50_000)
    assert state_before(before, terms, None, 9) == before.state
    after = state_before(before, terms, record, 20_000)
    assert (after.base, after.tokens, after.passes) == (20_000, 20_000, 1)
