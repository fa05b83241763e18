"""When a conversation is compacted: its state, and each reason to act."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest

from ctxgate.compression.economics import Shape
from ctxgate.compression.serving_cost import Latency, Speed
from ctxgate.compression.window import (
    KEEP,
    Compact,
    Conversation,
    Decision,
    Limits,
    Reason,
    Terms,
    begin,
    compacted,
    decide,
    edited,
    failed,
    fitted,
    observed,
    pays,
    postponed,
    target,
)
from support.compaction import PRICES, SHAPE, dollars

RATES = PRICES["1/.1/1/4"]
TERMS = Terms(RATES, SHAPE)  # F0 = 4.2k + 22k + 21.6k = 47.8k, at dollars per million
F0 = 47_800 * 10**9
FREE = Terms(dollars(0, 0, 0, 0), SHAPE)
WINDOW = Limits(window=262_144, largest_output=32_000, worst_batch=20_000, summary_call=6_000)


def at(tokens: int, *, base: int = 42_000, spent: int = 0, exhausted_until: int = 0) -> Conversation:
    """A conversation that grew by 1200 tokens in each of 50 requests."""
    return Conversation(base, tokens, 60_000, 50, spent, 10, passes=1, exhausted_until=exhausted_until)


def reason(decision: Decision) -> Reason | None:
    return decision.reason if isinstance(decision, Compact) else None


# ---- the state ------------------------------------------------------------------------------------------


def test_a_request_adds_its_growth_and_its_re_read() -> None:
    state = begin(SHAPE)
    assert state == Conversation(base=42_000, tokens=18_000)
    assert state.growth() is None
    state = observed(state, TERMS, 40_000)
    assert state == Conversation(42_000, 40_000, 22_000, 1, 0, 1)
    state = observed(state, TERMS, 43_000, cached=40_000)
    assert state == Conversation(42_000, 43_000, 25_000, 2, 1000 * 10**8, 2)
    assert state.growth() == 12_500


def test_what_a_miss_made_dearer_was_paid_for_the_excess() -> None:
    """30k above the base; 10k of what was sent before were not cached: 30k x .1 and 10k x (1 - .1)."""
    state = observed(at(70_000), TERMS, 72_000, cached=60_000)
    assert state.spent == 30_000 * 10**8 + 10_000 * 9 * 10**8
    # a compaction would not have spared the base: of a prompt that is all cold, 28k were carried
    assert observed(at(70_000), TERMS, 72_000, cached=0).spent == 30_000 * 10**8 + 28_000 * 9 * 10**8
    # right after a compaction nothing is carried, however little of the new prompt was cached
    assert observed(at(42_000), TERMS, 45_000, cached=18_000).spent == 3_000 * 10**8


def test_a_pass_begins_a_new_base() -> None:
    state = compacted(at(90_000, spent=F0), TERMS, 41_000)
    assert state == Conversation(41_000, 41_000, 60_000, 50, 0, 0, passes=2)


def test_a_shallow_pass_exhausts_until_x_star_more() -> None:
    """X* = sqrt(2 x 478,000 x 1200) = 33,870."""
    assert compacted(at(90_000), TERMS, 60_000, 100_000).exhausted_until == 0
    assert compacted(at(90_000), TERMS, 60_001, 100_000).exhausted_until == 60_001 + 33_870
    # where cached tokens are free, until a tenth of the trigger more
    assert compacted(at(90_000), FREE, 60_001, 100_000).exhausted_until == 70_001


def test_a_pass_that_came_to_nothing_waits_as_well() -> None:
    state = at(90_000, spent=F0 * 2)
    assert failed(state, TERMS) == replace(state, exhausted_until=90_000 + 33_870)
    assert failed(state, FREE).exhausted_until == 99_000
    assert failed(state, replace(FREE, limits=WINDOW)).exhausted_until == 90_000 + 20_414
    assert decide(state, TERMS) != KEEP == decide(failed(state, TERMS), TERMS)


def test_a_pass_that_found_too_little_waits_only_until_the_tail_has_moved_on() -> None:
    """Never longer than X*, which much early growth makes long: here 33,870 tokens."""
    state = at(90_000, spent=F0 * 2)
    assert postponed(state, TERMS, 4_001) == replace(state, exhausted_until=94_001)
    assert postponed(state, TERMS, 50_000) == failed(state, TERMS)
    assert postponed(state, TERMS, 0).exhausted_until == 90_001
    assert decide(at(94_000, spent=F0 * 2, exhausted_until=94_001), TERMS) == KEEP
    assert decide(at(94_001, spent=F0 * 2, exhausted_until=94_001), TERMS) != KEEP


def test_a_history_cut_by_its_client_takes_its_share_of_what_was_spent_along() -> None:
    state = at(90_000, spent=48_001, exhausted_until=95_000)
    assert edited(state, SHAPE, 54_000) == at(54_000, spent=12_000)
    assert edited(state, SHAPE, 20_000) == at(20_000, spent=0)
    # a base that a shallow pass left is none any more once the client went below it
    high = at(120_000, base=100_000, spent=5, exhausted_until=130_000)
    assert edited(high, SHAPE, 80_000) == at(80_000, base=80_000)
    assert edited(high, SHAPE, 30_000) == at(30_000, base=42_000)


def test_a_shorter_prompt_is_an_edited_history() -> None:
    state = observed(at(90_000, spent=48_000), TERMS, 54_000)
    assert state == Conversation(42_000, 54_000, 60_000, 51, 12_000 + 12_000 * 10**8, 11, passes=1)


# ---- money ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "spent", "due"),
    [
        (200_000, F0 // 2 - 1, False),  # too little was paid to trust the growth
        (42_000 + 33_870, F0 // 2, False),  # X* = 33,870.3
        (42_000 + 33_871, F0 // 2, True),
        (42_001, F0 * 3 // 2 - 1, False),
        (42_001, F0 * 3 // 2, True),  # enough was paid, whatever the growth says
    ],
)
def test_money_decides_by_what_was_paid_and_by_the_growth(tokens: int, spent: int, due: bool) -> None:
    assert reason(decide(at(tokens, spent=spent), TERMS)) is (Reason.MONEY if due else None)


def test_what_arrives_would_be_written_anyway() -> None:
    """10k that arrive take (1 - .1) x 10k = 9k off the price of 47.8k; more than the tail's 20k do not."""
    for arriving, price in ((10_000, 38_800), (20_000, 29_800), (50_000, 29_800)):
        for spent, due in ((price * 15 * 10**8 - 1, False), (price * 15 * 10**8, True)):
            state = replace(at(43_000, spent=spent), grown=10**12)
            assert pays(state, TERMS, arriving) is due


def test_what_arrives_is_evidence_of_the_growth() -> None:
    """60k in 50 requests: X* = 33,870; in 51 requests, the last without growth: 33,536."""
    state = at(42_000 + 33_600, spent=F0 // 2)
    assert not pays(state, TERMS, None)
    assert pays(state, TERMS, 0)
    # 10k more make it 70k in 51, at a price of 38.8k: X* = 32,635.8
    for excess, due in ((32_635, False), (32_636, True)):
        assert pays(at(42_000 + excess - 10_000, spent=F0 // 2), TERMS, 10_000) is due


def test_money_says_nothing_where_nothing_costs_anything() -> None:
    assert decide(at(1_000_000), FREE) == KEEP
    assert decide(at(42_000, spent=F0 * 9), TERMS) == KEEP


def test_the_ladder_asks_for_less() -> None:
    """At a quarter of the price, an eighth of F0 opens the estimate, X* is half: 16,935.2."""
    harder = replace(TERMS, harder=Fraction(1, 4))
    assert decide(at(42_000 + 16_935, spent=F0 // 8), harder) == KEEP
    assert decide(at(42_000 + 16_936, spent=F0 // 8 - 1), harder) == KEEP
    due = decide(at(42_000 + 16_936, spent=F0 // 8), harder)
    # the tail kept shrinks as well: 18k + 4k + 5k
    assert due == Compact(Reason.LADDER, 27_000, None)
    assert decide(at(42_000 + 16_936, spent=F0 // 8), TERMS) == KEEP
    assert reason(decide(at(42_001, spent=F0 * 3 // 2), harder)) is Reason.MONEY
    for wrong in (Fraction(0), Fraction(-1), Fraction(5, 4)):
        with pytest.raises(ValueError, match="factor"):
            replace(TERMS, harder=wrong)


# ---- the hard trigger -----------------------------------------------------------------------------------


def test_the_window_s_trigger_leaves_the_reserve() -> None:
    """262,144 - 32k - 20k - 6k."""
    assert WINDOW.window_trigger() == WINDOW.hard_trigger() == 204_144
    terms = replace(TERMS, limits=WINDOW)
    assert decide(at(204_143), terms) == KEEP
    assert decide(at(204_144), terms) == Compact(Reason.WINDOW, 42_000, 204_144)
    assert decide(at(203_000), terms, 1_144) == Compact(Reason.WINDOW, 42_000, 204_144)


def test_context_f10_a_reserve_larger_than_the_window_leaves_half_of_it() -> None:
    assert Limits(window=2_048, largest_output=32_000).window_trigger() == 1_024
    terms = replace(TERMS, limits=Limits(window=2_048, largest_output=32_000))
    # before the first pass the base is only planned: a window below it is no reason to wait
    assert decide(begin(replace(SHAPE, prefix=100)), terms) == KEEP
    first = Conversation(base=42_000, tokens=1_024)
    assert decide(first, terms) == Compact(Reason.WINDOW, 614, 1_024)


def test_a_price_tier_s_edge_is_a_trigger_of_its_own() -> None:
    limits = replace(WINDOW, tier_edge=200_000, margin=8_000)
    assert (limits.tier_trigger(), limits.hard_trigger()) == (192_000, 192_000)
    terms = replace(TERMS, limits=limits)
    assert decide(at(191_999), terms) == KEEP
    assert decide(at(192_000), terms) == Compact(Reason.TIER, 42_000, 192_000)
    assert decide(at(204_144), terms) == Compact(Reason.WINDOW, 42_000, 192_000)
    # a prefix and summary that fill the lower tier alone leave nothing to gain
    huge = replace(TERMS, limits=limits, shape=replace(SHAPE, prefix=188_000))
    assert decide(at(192_000, base=190_000), huge) == KEEP
    fits = replace(huge, shape=replace(SHAPE, prefix=187_999))
    assert reason(decide(at(192_000, base=190_000), fits)) is Reason.TIER
    assert decide(Conversation(base=212_000, tokens=193_000), fits) == KEEP
    only = replace(TERMS, limits=Limits(tier_edge=200_000))
    assert reason(decide(at(200_000), only)) is Reason.TIER
    assert (only.limits.window_trigger(), only.limits.brink()) == (None, None)


def test_a_shape_is_fitted_to_the_window() -> None:
    """0.6 of 50k are 30k; the prefix and the summary take 22k of them."""
    small = Limits(window=60_000, largest_output=10_000)
    assert fitted(SHAPE, small) == replace(SHAPE, tail=8_000)
    assert fitted(SHAPE, Limits(window=2_000)) == replace(SHAPE, tail=0)
    assert fitted(SHAPE, WINDOW) == fitted(SHAPE, Limits()) == SHAPE


@pytest.mark.parametrize("wrong", [{"window": 0}, {"tier_edge": 0}, {"margin": -1}, {"worst_batch": -1}])
def test_limits_that_make_no_sense_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"at least one token|negative"):
        Limits(**wrong)


def test_the_target_is_deep_enough() -> None:
    small = Limits(window=60_000, largest_output=10_000)
    assert target(replace(TERMS, limits=small)) == 30_000
    assert target(TERMS) == 42_000
    assert target(replace(TERMS, harder=Fraction(1, 3))) == 28_666


# ---- hysteresis -----------------------------------------------------------------------------------------


def test_right_after_a_pass_nothing_is_due_until_it_has_grown() -> None:
    terms = replace(TERMS, limits=Limits(window=50_000))
    state = compacted(at(60_000), terms, 49_999)
    assert decide(state, terms) == KEEP
    assert decide(state, terms, 0) == KEEP
    assert reason(decide(state, terms, 1)) is Reason.WINDOW
    # even one that found nothing to remove
    full = compacted(at(60_000), terms, 60_000, 50_000)
    assert decide(full, terms) == decide(full, terms, 0) == KEEP
    assert reason(decide(full, terms, 1)) is Reason.WINDOW


def test_context_f5_an_exhausted_conversation_waits_until_the_window_is_full() -> None:
    """After a shallow pass at a trigger of 204,144: 262,144 - 6k - 1 is where the summary just fits."""
    terms = replace(TERMS, limits=replace(WINDOW, tier_edge=180_000))
    state = compacted(at(210_000), terms, 150_000, 180_000)
    assert state.exhausted_until == 183_870
    assert decide(replace(state, tokens=183_869, spent=F0 * 9), terms) == KEEP
    assert reason(decide(replace(state, tokens=183_870), terms)) is Reason.TIER
    full = replace(state, exhausted_until=300_000)
    assert decide(replace(full, tokens=256_142, spent=F0 * 9), terms) == KEEP
    assert reason(decide(replace(full, tokens=256_143), terms)) is Reason.WINDOW


# ---- latency --------------------------------------------------------------------------------------------

SPEED = Speed.from_seconds(linear=80e-6, attention=8e-10, step=0.02, context=1e-7)


def slow(**limits: int) -> Terms:
    return replace(FREE, latency=Latency(SPEED, **limits))


def test_length_that_breaks_the_latency_budget_is_a_reason_without_money() -> None:
    """20 ms + .1 us per token of context: 24.2 ms at the base of 42k, 30 ms at 100k."""
    assert decide(at(100_000), slow(between_ms=30)) == KEEP
    assert decide(at(100_001), slow(between_ms=30)) == Compact(Reason.LATENCY, 42_000, 100_001)
    # where the base is too slow as well, its length is not the reason
    assert decide(at(100_001), slow(between_ms=24)) == KEEP


def test_the_first_token_is_predicted_for_what_is_new() -> None:
    """8k that arrive at 92k: .64 s + 8e-10 x 8k x 96k = 1.2544 s, at 42k .8832 s; 1200 as usual: .19 s."""
    terms = slow(first_ms=1_200)
    assert reason(decide(at(92_000), terms, 8_000)) is Reason.LATENCY
    assert decide(at(92_000), terms) == KEEP
    assert decide(at(92_000), slow(first_ms=1_200, waiting_ms=1_100), 8_000) == KEEP


def test_a_budget_that_is_kept_leaves_money_to_decide() -> None:
    terms = replace(TERMS, latency=Latency(SPEED, between_ms=500))
    assert decide(at(100_000), terms) == KEEP
    assert reason(decide(at(100_000, spent=F0 * 2), terms)) is Reason.MONEY


def test_every_shape_is_accepted() -> None:
    nothing = Terms(RATES, Shape(0, 0, 0, 0))
    assert decide(Conversation(0, 0), nothing) == KEEP
    assert reason(decide(observed(Conversation(0, 0), nothing, 5), nothing)) is Reason.MONEY


# ---- conversations turn by turn -------------------------------------------------------------------------


def played(terms: Terms, turns: int, *, start: int, step: int, left: int | None) -> tuple[list[int], int]:
    """The turns after which a growing conversation is compacted, and its longest prompt.

    A pass leaves `left` tokens, or comes to nothing where that is None.
    """
    state, prompt, longest = begin(terms.shape), start, start
    due: list[int] = []
    for turn in range(turns):
        prompt += step
        longest = max(longest, prompt)
        state = observed(state, terms, prompt)
        decision = decide(state, terms)
        if isinstance(decision, Compact):
            due.append(turn)
            state = failed(state, terms) if left is None else compacted(state, terms, left, decision.trigger)
            prompt = state.tokens
    return due, longest


def test_context_f1_f4_f8_an_overhead_above_the_trigger_is_not_compacted_in_every_turn() -> None:
    """29k that no pass removes, above a trigger of 27.9k; the agent goes on by itself, 300 tokens a turn.

    From the first, shallow pass on only the full window counts: 33,999 tokens, 17 turns later each time.
    """
    limits = Limits(window=40_000, largest_output=6_100, summary_call=6_000)
    assert (limits.window_trigger(), limits.brink()) == (27_900, 33_999)
    due, _ = played(Terms(FREE.rates, SHAPE, limits), 60, start=29_000, step=300, left=29_000)
    assert due[0] == 0
    pauses = [after - before for before, after in pairwise(due)]
    assert min(pauses) * 300 >= 27_900 // 10, "a tenth of the trigger, where nothing costs anything"
    due, _ = played(replace(TERMS, limits=limits), 60, start=29_000, step=300, left=29_000)
    assert due == [0, 17, 34, 51]


def test_context_f2_after_a_pass_without_progress_none_follows() -> None:
    """43k that stay, 33.5k usable: one try, and none in the 35 turns until the window is full at 53,999."""
    limits = Limits(window=60_000, largest_output=20_500, summary_call=6_000)
    assert limits.window_trigger() == 33_500
    due, longest = played(replace(TERMS, limits=limits), 36, start=43_000, step=300, left=None)
    assert (due, longest) == ([0], 53_800)


def test_context_f5_one_round_nearly_as_long_as_the_trigger_holds_no_other_pass_back() -> None:
    """A round of 0.9 of the trigger stays: money waits, but a prompt that would not fit does not."""
    terms = replace(TERMS, limits=WINDOW)
    state = compacted(at(204_144), terms, 183_730, 204_144)
    assert decide(replace(state, tokens=200_000, spent=F0 * 9), terms) == KEEP
    assert reason(decide(replace(state, tokens=256_143), terms)) is Reason.WINDOW


def test_gateways_n5_bursts_at_the_trigger_do_not_bring_one_pass_after_the_other() -> None:
    """190k stay whatever is done; 100 tokens a turn, and 9,000 in each tenth one, around a trigger of 204k.

    No pass moves the trigger down. Each one yields less than a tenth, so the next one waits for the growth
    that pays for it, or for the full window at 230k: 40k, which are 40 turns at 990 tokens on average.
    """
    terms = replace(TERMS, limits=WINDOW)
    state, prompt = begin(SHAPE), 190_000
    due, triggers = list[int](), list[int | None]()
    for turn in range(400):
        prompt += 9_000 if turn % 10 == 9 else 100
        state = observed(state, terms, prompt)
        decision = decide(state, terms)
        if isinstance(decision, Compact):
            due.append(turn)
            triggers.append(decision.trigger)
            prompt = 190_000
            state = compacted(state, terms, prompt, decision.trigger)
    assert set(triggers) == {terms.limits.window_trigger()}
    pauses = [after - before for before, after in pairwise(due)]
    assert min(pauses) >= 40, due


def test_context_g9_prompt_and_answer_never_exceed_the_window_by_one() -> None:
    """180,225 and 16,384 are 196,609, one more than the window has."""
    terms = replace(TERMS, limits=Limits(window=196_608, largest_output=16_384))
    assert decide(at(180_223), terms) == KEEP
    assert reason(decide(at(180_224), terms)) is Reason.WINDOW
    assert reason(decide(at(180_000), terms, 225)) is Reason.WINDOW


@pytest.mark.parametrize("window", [None, 1_000_000])
def test_context_i2_i4_the_cost_bounds_a_conversation_far_from_any_window(window: int | None) -> None:
    """500 turns of 1200 tokens, 618k in all; X* = 33,870 above a base of 42k, and one turn more."""
    terms = replace(TERMS, limits=Limits(window=window))
    due, longest = played(terms, 500, start=18_000, step=1200, left=42_000)
    assert len(due) > 10
    assert longest <= 42_000 + 2 * 33_870


def test_gateways_n4_where_reading_again_costs_nothing_the_window_and_the_latency_bound_the_length() -> None:
    """Cached tokens are free, everything else is not: money alone would never compact 618k."""
    terms = Terms(dollars(1, 0, 1, 4), SHAPE)
    assert played(terms, 500, start=18_000, step=1200, left=42_000) == ([], 618_000)
    _, longest = played(replace(terms, limits=WINDOW), 500, start=18_000, step=1200, left=42_000)
    assert longest < 204_144 + 1200
    quick = replace(terms, latency=Latency(SPEED, between_ms=30))
    _, longest = played(quick, 500, start=18_000, step=1200, left=42_000)
    assert longest < 100_001 + 1200
