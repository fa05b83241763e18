"""Estimates for calls whose usage is missing."""

from __future__ import annotations

import pytest

from ctxgate.inference.estimate import (
    TokenRatio,
    estimate_output_tokens,
    estimate_prompt_tokens,
    fill_unknown,
)
from ctxgate.inference.usage import NOTHING_KNOWN, NOTHING_USED, UNKNOWN, Usage, estimated, measured


def test_gateways_b10_missing_usage_is_estimated_from_the_text_and_marked() -> None:
    output = estimate_output_tokens(1_001, 40, TokenRatio())
    assert output == estimated(251)  # 1001 / 4, rounded up


def test_every_content_chunk_is_at_least_one_token() -> None:
    assert estimate_output_tokens(100, 40, TokenRatio()) == estimated(40)
    assert estimate_output_tokens(0, 0, TokenRatio()) == estimated(0)


def test_prompt_estimate() -> None:
    assert estimate_prompt_tokens(4_096, TokenRatio()) == estimated(1_024)
    assert estimate_prompt_tokens(1, TokenRatio()) == estimated(1)


def test_ratio_is_learned_from_measured_calls() -> None:
    ratio = TokenRatio().updated(3_000, 1_000)
    assert ratio.bytes_per_token == 3.0
    assert estimate_prompt_tokens(900, ratio) == estimated(300)


def test_one_outlier_does_not_move_the_ratio() -> None:
    ratio = TokenRatio()
    for tokens in (100, 101, 99, 100):
        ratio = ratio.updated(300, tokens)
    assert ratio.updated(6_000, 100).bytes_per_token == 3.0


def test_ratio_follows_a_lasting_change() -> None:
    ratio = TokenRatio()
    for _ in range(15):
        ratio = ratio.updated(300, 100)
    for _ in range(8):
        ratio = ratio.updated(500, 100)
    assert ratio.bytes_per_token == 5.0
    assert len(ratio.samples) == 15


@pytest.mark.parametrize(
    ("size", "tokens"), [(0, 100), (400, 0), (400, 15), (6_401, 100), (24, 100), (400, -3)]
)
def test_pairs_that_say_nothing_are_ignored(size: int, tokens: int) -> None:
    assert TokenRatio().updated(size, tokens) == TokenRatio()


def test_gateways_b11_known_counts_are_never_replaced() -> None:
    zero = Usage(measured(1_200), measured(0), measured(0))
    assert fill_unknown(zero, prompt=9, cached=9, output=9) == zero
    assert fill_unknown(NOTHING_USED, prompt=9, cached=9, output=9) == NOTHING_USED


def test_api_b12_a_stream_without_usage_is_not_recorded_as_zero() -> None:
    filled = fill_unknown(NOTHING_KNOWN, prompt=100, cached=60, output=7)
    assert filled == Usage(estimated(40), estimated(60), estimated(7))


def test_gateways_b7_a_measured_total_bounds_the_predicted_hit() -> None:
    record = Usage(UNKNOWN, UNKNOWN, measured(3), prompt_total=measured(100))
    assert fill_unknown(record, prompt=1, cached=96).uncached == estimated(4)
    clipped = fill_unknown(record, cached=1_000)
    assert (clipped.uncached, clipped.cached) == (estimated(0), estimated(100))
    assert clipped.prompt == 100


def test_without_a_prediction_the_whole_prompt_is_priced_as_uncached() -> None:
    record = Usage(UNKNOWN, UNKNOWN, measured(3), prompt_total=measured(100))
    filled = fill_unknown(record)
    assert (filled.uncached, filled.cached, filled.prompt) == (estimated(100), UNKNOWN, 100)


def test_a_measured_hit_without_a_prompt_gets_its_rest_estimated() -> None:
    filled = fill_unknown(Usage(UNKNOWN, measured(64), UNKNOWN), prompt=100, cached=5)
    assert (filled.uncached, filled.cached) == (estimated(36), measured(64))
    assert fill_unknown(Usage(UNKNOWN, measured(64), UNKNOWN), prompt=10).uncached == estimated(0)


def test_a_measured_uncached_part_stays() -> None:
    filled = fill_unknown(Usage(measured(30), UNKNOWN, UNKNOWN), prompt=100, cached=200)
    assert (filled.uncached, filled.cached) == (measured(30), estimated(70))


def test_the_written_part_stays_inside_the_uncached_one() -> None:
    record = Usage(UNKNOWN, UNKNOWN, UNKNOWN, written=measured(50), prompt_total=measured(100))
    filled = fill_unknown(record, cached=90)
    assert (filled.uncached, filled.cached) == (estimated(50), estimated(50))


def test_nothing_to_go_by_stays_unknown() -> None:
    assert fill_unknown(NOTHING_KNOWN) == NOTHING_KNOWN
