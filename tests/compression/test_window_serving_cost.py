"""Predicted latency at a length, and rates from GPU-seconds."""

from __future__ import annotations

from datetime import date
from fractions import Fraction

import pytest

from ctxgate.compression.economics import Shape, overhead, warm_request
from ctxgate.compression.serving_cost import (
    FS_PER_MS,
    Latency,
    Load,
    Speed,
    between_tokens,
    gpu_rates,
    time_to_first,
)

DAY = date(2026, 11, 30)
# 80 us and .8 ns per token and pair; 20 ms per step and 10 ns per token of context.
SPEED = Speed.from_seconds(linear=80e-6, attention=8e-10, step=0.02, context=1e-8)
LOAD = Load(length=100_000, new=2_000, output=500, batch=20, kv_tokens=2_000_000, gpu_hour_nano=36 * 10**8)


def test_seconds_become_integers() -> None:
    assert Speed(80_000_000_000, 800_000, 20_000_000_000_000, 10_000_000) == SPEED
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="negative or not finite"):
            Speed.from_seconds(wrong, 0, 0, 0)


def test_time_to_the_first_token_has_a_quadratic_part() -> None:
    """2k new tokens: .16 s, and 8e-10 x 2k x (L - 1k): .0304 s on 20k, 1.4384 s on 900k of length."""
    assert time_to_first(SPEED, 2_000, 20_000) == (160_000 + 30_400) * 10**9
    assert time_to_first(SPEED, 2_000, 900_000, waiting=5) == (160_000 + 1_438_400) * 10**9 + 5


def test_time_between_tokens_grows_with_the_context() -> None:
    assert between_tokens(SPEED, 0) == 20 * FS_PER_MS
    assert between_tokens(SPEED, 500_000) == 25 * FS_PER_MS


@pytest.mark.parametrize(
    ("limits", "fits"),
    [
        ({}, True),
        ({"first_ms": 239}, False),  # .16 + 8e-10 x 2k x 49k + .0016 = .2384 + waiting 1 ms
        ({"first_ms": 240}, True),
        ({"between_ms": 20}, False),  # 20.5 ms at 50k
        ({"between_ms": 21}, True),
        ({"whole_ms": 2_288}, False),  # 239.4 + 100 x 20.5 = 2289.4
        ({"whole_ms": 2_290}, True),
        ({"first_ms": 240, "between_ms": 20}, False),
    ],
)
def test_a_budget_is_kept_in_every_limit(limits: dict[str, int], fits: bool) -> None:
    latency = Latency(SPEED, output=100, waiting_ms=1, **limits)
    # .16 s + 8e-10 x 2k x (50k - 1k) = .2384 s, and 1 ms of queue
    assert latency.fits(2_000, 50_000) is fits


def test_gpu_rates_add_up_to_the_seconds_of_the_usual_request() -> None:
    """3.6 dollars an hour are a thousandth of a dollar a second.

    Prefill: .16 + 8e-10 x 2k x 99k = .3184 s.
    """
    rates = gpu_rates(SPEED, LOAD, DAY)
    # a cached token: 2k x .8 ns + 500 x 10 ns = 6.6 us of time; 10.8 s / 2M = 5.4 us of memory
    assert rates.cached == 6_600_000  # 6.6 us x .001 $/s = 6.6e-9 $ a token
    # a new one: 80 us + .8 us + 5 us
    assert rates.uncached == rates.written == 85_800_000
    # an output token: a twentieth of the step, and half of the outputs before it: 1 ms + 2.5 us
    assert rates.output == 1_002_500_000
    assert (rates.effective, rates.above_prompt_tokens) == (DAY, 0)
    # .3184 s, 500 x 1 ms, 500 x 100k x 10 ns and half of 500 x 500 x 10 ns
    seconds = Fraction(3184, 10_000) + Fraction(5, 10) + Fraction(5, 10) + Fraction(125, 100_000)
    assert warm_request(rates, 100_000, 2_000, 500) == seconds * 10**6 * 10**6


def test_memory_prices_a_cached_token_where_it_is_scarcer_than_time() -> None:
    load = Load(length=100_000, new=2_000, output=500, batch=20, kv_tokens=200_000, gpu_hour_nano=36 * 10**8)
    # .3184 s + 500 x 21 ms = 10.8184 s / 200k tokens = 54.092 us
    assert gpu_rates(SPEED, load, DAY).cached == 54_092_000
    tight = Load(length=100_000, new=2_000, output=500, batch=20, kv_tokens=100_000, gpu_hour_nano=36 * 10**8)
    rates = gpu_rates(SPEED, tight, DAY)
    assert rates.cached == rates.uncached == rates.written == 108_184_000


def test_money_compacts_on_hardware_of_ones_own_at_these_rates() -> None:
    """A cached price of 0 never compacts; GPU-seconds make the overhead a few requests' re-reads."""
    rates = gpu_rates(SPEED, LOAD, DAY)
    shape = Shape(prefix=18_000, summary=4_000, tail=20_000, summary_output=1_000)
    reread = rates.cached * 100_000
    assert 0 < overhead(rates, shape) < 6 * reread


@pytest.mark.parametrize(
    "wrong",
    [
        {"new": 100_001},
        {"new": -1},
        {"output": -1},
        {"gpu_hour_nano": -1},
        {"batch": 0},
        {"kv_tokens": 0},
    ],
)
def test_a_load_that_makes_no_sense_is_refused(wrong: dict[str, int]) -> None:
    given = {"length": 100_000, "new": 2, "output": 5, "batch": 2, "kv_tokens": 2, "gpu_hour_nano": 3}
    with pytest.raises(ValueError, match=r"usual request|at least one"):
        Load(**(given | wrong))
