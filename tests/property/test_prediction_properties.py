"""Margins cover what they promise, whatever the residuals do; fits and lengths stay within their bounds."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxgate.inference.twin_profile import PROFILES
from ctxgate.routing.conformal import Margin
from ctxgate.routing.latency import Predictor, Sample, default_speed
from ctxgate.routing.latency_fit import fit
from ctxgate.routing.output_length import OutputLengths
from ctxgate.routing.snapshot import IDLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.integration

COUNT = 600


def steady(rng: random.Random, _: int) -> float:
    return rng.gauss(0, 1)


def heavy(rng: random.Random, _: int) -> float:
    """Pareto with an infinite variance."""
    return rng.paretovariate(1.2)


def skewed(rng: random.Random, _: int) -> float:
    return rng.lognormvariate(0, 2)


def drifting(rng: random.Random, at: int) -> float:
    return rng.gauss(at / 30, 1 + at / 100)


def jumping(rng: random.Random, at: int) -> float:
    return rng.gauss(50 if at % 300 > 150 else 0, 1)


def ties(rng: random.Random, _: int) -> float:
    return float(rng.randint(0, 40))


KINDS: list[Callable[[random.Random, int], float]] = [steady, heavy, skewed, drifting, jumping, ties]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(KINDS), st.integers(0, 2**32), st.sampled_from([0.9, 0.75, 0.95]))
def test_the_share_below_the_margin_is_the_promised_one(
    kind: Callable[[random.Random, int], float], seed: int, coverage: float
) -> None:
    rng, margin = random.Random(seed), Margin(0.0, coverage)
    covered = 0
    for at in range(COUNT):
        residual = kind(rng, at)
        covered += residual <= margin.value
        margin.add(residual)
    assert abs(covered / COUNT - coverage) <= 0.03


def slowly(at: int) -> float:
    return 1.0 + at / 200


def suddenly(at: int) -> float:
    return 3.0 if at > COUNT * 0.6 else 1.0


def never(_: int) -> float:
    return 1.0


def requests(seed: int, factor: Callable[[int], float]) -> Iterator[Sample]:
    """Answers of a standard replica with noise, one in twenty late by a Pareto factor."""
    rng, true = random.Random(seed), PROFILES["standard"]
    for at in range(COUNT):
        length = min(int(rng.lognormvariate(9.5, 1.0)) + 64, 900_000)
        new = max(int(length * rng.choice([0.02, 0.1, 1.0])), 1)
        noise = rng.lognormvariate(0, 0.1) * (rng.paretovariate(1.2) if rng.random() < 0.05 else 1.0)
        ttft_s = (0.02 + true.prefill(new, length)) * noise * factor(at)
        itl_s = true.decode([length]) * rng.lognormvariate(0, 0.1) * factor(at)
        yield Sample(new, length, ttft_s, 0.0, 100, itl_s)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([never, slowly, suddenly]), st.sampled_from(["fast", None]))
def test_predicted_times_cover_nine_in_ten_and_are_off_by_less_than_a_fifth(
    seed: int, factor: Callable[[int], float], prior: str | None
) -> None:
    """From the 200th request on: heavy tails, drift, and a prior of another machine or none."""
    predictor = Predictor(None if prior is None else default_speed(prior))
    first, between, off = [], [], []
    for at, sample in enumerate(requests(seed, factor)):
        speed = predictor.speed()
        if at >= 200:
            assert speed is not None
            assert sample.ttft_s is not None
            assert sample.itl_s is not None
            predicted = speed.ttft_s(sample.new, sample.length, IDLE)
            first.append(sample.ttft_s <= predicted)
            between.append(sample.itl_s <= speed.itl_s(sample.length, IDLE))
            expected = speed.base_s + speed.prefill_s(sample.new, sample.length)
            off.append(abs(expected - sample.ttft_s) / sample.ttft_s)
        predictor.observe(sample)
    assert 0.87 <= sum(first) / len(first) <= 0.93
    assert 0.87 <= sum(between) / len(between) <= 0.93
    assert sorted(off)[len(off) // 2] <= 0.2


times = st.floats(1e-6, 1e5)
rows = st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e12), times), max_size=40)


@given(rows, st.tuples(st.floats(0, 1), st.floats(0, 1e-2), st.floats(0, 1e-6)))
def test_no_row_makes_a_coefficient_negative_or_endless(
    found: list[tuple[float, float, float]], prior: tuple[float, float, float]
) -> None:
    units = (max(prior[0], 0.02), max(prior[1], 1e-6), max(prior[2], 1e-11))
    for coefficient in fit(found, prior, prior, units):
        assert 0.0 <= coefficient < 1e9


@given(
    st.lists(st.tuples(st.integers(1, 10_000), st.booleans()), max_size=200),
    st.none() | st.integers(1, 20_000),
    st.floats(0.05, 0.95),
)
def test_an_expected_length_is_one_that_was_seen_or_the_limit(
    answers: list[tuple[int, bool]], limit: int | None, share: float
) -> None:
    known = OutputLengths(share)
    for tokens, cut in answers:
        known.learn("t", "m", "agent", tokens, cut=cut)
    expected = known.expected("t", "m", "agent", limit)
    assert limit is None or expected <= limit
    assert expected in {256, limit} | {tokens for tokens, _ in answers}
