"""A pool's predictor: it learns its own pool, from what was measured, and says when it knows nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from ctxgate.inference.twin_profile import PROFILES
from ctxgate.routing.latency import ENOUGH, WINDOW, Predictor, Sample, default_speed
from ctxgate.routing.snapshot import IDLE, Work

if TYPE_CHECKING:
    from ctxgate.inference.twin_profile import Profile
    from ctxgate.routing.snapshot import Speed

PROMPTS = [(n, length) for length in (2000, 16_000, 120_000) for n in (64, 500, 2000)]
BASE_S = 0.03


def answered(profile: Profile, new: int, length: int, work: Work = IDLE, queue_s: float = 0.0) -> Sample:
    """What a replica of this profile takes, to the letter."""
    contexts = [length] + [work.context_tokens // max(work.decoding, 1)] * work.decoding
    ttft_s = BASE_S + profile.prefill(new, length) + queue_s
    return Sample(new, length, ttft_s, queue_s, 100, profile.decode(contexts), work)


def taught(predictor: Predictor, profile: Profile, rounds: int = 15) -> Speed:
    for number in range(rounds):
        for new, length in PROMPTS:
            work = Work(decoding=number % 4, context_tokens=number % 4 * 8000)
            predictor.observe(answered(profile, new, length, work))
    speed = predictor.speed()
    assert speed is not None
    return speed


def test_before_any_sample_it_says_what_was_configured_with_a_margin() -> None:
    speed = Predictor(default_speed("fast")).speed()
    assert speed is not None
    assert (speed.linear_s, speed.attention_s) == (25e-6, 2.5e-10)
    assert (speed.step_s, speed.sequence_s, speed.context_s) == (7e-3, 0.15e-3, 4e-9)
    assert speed.slots == 16
    assert speed.rho_s > 0
    assert speed.itl_rho_s > 0


def test_routing_f2_a_pool_without_samples_or_settings_is_unknown_not_of_a_default_speed() -> None:
    predictor = Predictor()
    assert predictor.speed() is None
    for at in range(ENOUGH - 1):
        predictor.observe(answered(PROFILES["fast"], *PROMPTS[at % len(PROMPTS)]))
        assert predictor.speed() is None
    predictor.observe(answered(PROFILES["fast"], *PROMPTS[0]))
    assert predictor.speed() is not None


def test_routing_f2_what_a_sample_does_not_show_is_not_taken_for_zero() -> None:
    predictor = Predictor(default_speed("fast"))
    before = predictor.speed()
    for sample in (
        Sample(100, 1000),
        Sample(0, 1000, 0.5),
        Sample(100, 1000, None, None, 1, 0.01),
        Sample(100, 1000, None, None, 50, None),
    ):
        predictor.observe(sample)
    assert predictor.samples == 0
    assert predictor.speed() == before


@pytest.mark.parametrize("prior", ["fast", "standard", None])
def test_it_learns_the_true_coefficients_whatever_it_began_with(prior: str | None) -> None:
    true = PROFILES["standard"]
    speed = taught(Predictor(None if prior is None else default_speed(prior)), true)
    for new, length in [*PROMPTS, (1, 900_000), (2000, 900_000)]:
        point = speed.base_s + speed.prefill_s(new, length)
        assert point == pytest.approx(BASE_S + true.prefill(new, length), rel=0.05)
    work = Work(decoding=3, context_tokens=24_000)
    assert speed.itl_s(60_000, work) == pytest.approx(true.decode([60_000, 8000, 8000, 8000]), rel=0.1)


def test_the_quadratic_part_of_a_long_prompt_is_learned() -> None:
    """2,000 new tokens behind 900k are not 2,000 behind 20k: 0.16 s + 1.44 s there, 0.16 s + 0.03 s here."""
    speed = taught(Predictor(default_speed("fast")), PROFILES["standard"])
    long, short = (speed.prefill_s(2000, length) for length in (900_000, 20_000))
    assert long == pytest.approx(1.598, rel=0.05)
    assert short == pytest.approx(0.190, rel=0.05)


def test_routing_f9_pools_of_different_hardware_are_learned_apart() -> None:
    quick, slow = Predictor(default_speed("fast")), Predictor(default_speed("fast"))
    for at in range(200):
        new, length = PROMPTS[at % len(PROMPTS)]
        quick.observe(answered(PROFILES["fast"], new, length))
        slow.observe(answered(PROFILES["fast"].scaled(6), new, length))
    one, six = quick.speed(), slow.speed()
    assert one is not None
    assert six is not None
    assert six.prefill_s(2000, 16_000) / one.prefill_s(2000, 16_000) == pytest.approx(6, rel=0.1)


def test_routing_b12_what_a_warm_prefix_saves_is_measured_for_each_pool() -> None:
    """Where prefill is cheap beside decoding, a hit of 14k tokens is worth little; where it is dear, much."""
    bound = PROFILES["standard"]
    cheap = PROFILES["fast"].scaled(0.05)
    by_prefill, by_decode = taught(Predictor(), bound), taught(Predictor(), cheap)
    saved = [
        speed.ttft_s(16_000, 16_000, IDLE) - speed.ttft_s(2000, 16_000, IDLE)
        for speed in (by_prefill, by_decode)
    ]
    assert saved[0] == pytest.approx(bound.prefill(16_000, 16_000) - bound.prefill(2000, 16_000), rel=0.05)
    assert saved[1] == pytest.approx(cheap.prefill(16_000, 16_000) - cheap.prefill(2000, 16_000), rel=0.15)


def test_gateways_k4_a_pool_of_long_answers_is_not_taken_for_one_with_late_first_tokens() -> None:
    """The two times are learned apart: a thousand slow tokens leave the time to the first one alone."""
    predictor = Predictor(default_speed("standard"))
    for at in range(100):
        new, length = PROMPTS[at % len(PROMPTS)]
        ttft_s = BASE_S + PROFILES["standard"].prefill(new, length)
        predictor.observe(Sample(new, length, ttft_s, 0.0, 1000, 0.4))
    speed = predictor.speed()
    assert speed is not None
    assert speed.itl_s(16_000, IDLE) == pytest.approx(0.4, rel=0.1)
    assert speed.ttft_s(500, 16_000, IDLE) == pytest.approx(
        BASE_S + PROFILES["standard"].prefill(500, 16_000), rel=0.1
    )


def test_the_queue_that_the_engine_tells_is_no_part_of_the_speed() -> None:
    predictor, true = Predictor(default_speed("fast")), PROFILES["standard"]
    for at in range(200):
        predictor.observe(answered(true, *PROMPTS[at % len(PROMPTS)], queue_s=0.5 + at % 3))
    speed = predictor.speed()
    assert speed is not None
    assert speed.base_s + speed.prefill_s(2000, 16_000) == pytest.approx(
        BASE_S + true.prefill(2000, 16_000), rel=0.05
    )
    late_s = speed.ttft_s(2000, 16_000, IDLE) - speed.base_s - speed.prefill_s(2000, 16_000)
    assert late_s >= 1.0  # but the wait was not foreseen, and nine in ten must be covered


def test_without_the_engines_word_the_queue_is_what_was_known_to_wait() -> None:
    true = PROFILES["standard"]
    predictor = Predictor(default_speed("standard"))
    for at in range(200):
        new, length = PROMPTS[at % len(PROMPTS)]
        work = Work(prefill_tokens=300 * (at % 3), prefill_pairs=45_000 * (at % 3))
        waited = true.linear_s * work.prefill_tokens + true.attention_s * work.prefill_pairs
        sample = Sample(new, length, BASE_S + true.prefill(new, length) + waited, None, work=work)
        predictor.observe(sample)
    speed = predictor.speed()
    assert speed is not None
    assert speed.base_s + speed.prefill_s(500, 16_000) == pytest.approx(
        BASE_S + true.prefill(500, 16_000), rel=0.05
    )


@pytest.mark.parametrize("slots", [1, 8])
def test_a_wait_for_slots_that_the_engine_has_does_not_make_others_early(slots: int) -> None:
    """Eight in flight, and each answer begins after 0.2 s: nobody has waited 10 s (8 * 500 * 20 ms / 8)."""
    predictor = Predictor(replace(default_speed("standard"), slots=slots))
    busy = Work(decoding=8, context_tokens=8000)
    for _ in range(WINDOW):
        predictor.observe(Sample(1000, 1000, 0.2, output=500, itl_s=0.02, work=busy, in_flight=8))
    speed = predictor.speed()
    assert speed is not None
    assert speed.rho_share > -1
    assert speed.rho_share == 0.5  # as at the start: nothing was learned of it
    assert speed.ttft_s(1000, 1000, IDLE) >= default_speed("standard").prefill_s(1000, 1000)


def test_answers_before_any_slot_was_to_be_free_leave_what_is_predicted_at_zero() -> None:
    """Of the 0.666 s predicted for 8,000 tokens nothing may be left, and it is never less than that.

    100 tokens were new after all, and a wait of 0.1 s (500 * 20 ms / 100) did not come.
    """
    predictor = Predictor(replace(default_speed("standard"), slots=100))
    told = {"output": 500, "itl_s": 0.02, "work": Work(decoding=99), "in_flight": 100}
    for _ in range(WINDOW):
        predictor.observe(Sample(100, 8000, 0.05, **told, estimated_new=8000, estimated_length=8000))  # type: ignore[arg-type]  # mixed
    speed = predictor.speed()
    assert speed is not None
    assert speed.rho_share == pytest.approx(-0.6656 / (0.6656 + 0.02))
    assert speed.ttft_s(8000, 8000, IDLE) == pytest.approx(0.0, abs=1e-9)


def test_the_margin_covers_what_was_estimated_wrong_too() -> None:
    """Prompts are always 1,000 tokens longer than thought: the margin is the time of those."""
    predictor = Predictor(default_speed("standard"))
    true = PROFILES["standard"]
    for _ in range(100):
        ttft_s = true.prefill(3000, 3000)
        predictor.observe(Sample(3000, 3000, ttft_s, 0.0, estimated_new=2000, estimated_length=2000))
    speed = predictor.speed()
    assert speed is not None
    assert speed.ttft_s(2000, 2000, IDLE) == pytest.approx(true.prefill(3000, 3000), rel=0.05)


def test_one_wild_answer_right_after_the_start_wrecks_nothing() -> None:
    predictor = Predictor(default_speed("standard"))
    new, length = 500, 16_000
    before = predictor.speed()
    predictor.observe(Sample(new, length, 100 * PROFILES["standard"].prefill(new, length), 0.0))
    after = predictor.speed()
    assert before is not None
    assert after is not None
    assert after.prefill_s(new, length) < 5 * before.prefill_s(new, length)
    for _ in range(20):
        predictor.observe(answered(PROFILES["standard"], new, length))
    after = predictor.speed()
    assert after is not None
    assert after.base_s + after.prefill_s(new, length) == pytest.approx(
        BASE_S + PROFILES["standard"].prefill(new, length), rel=0.1
    )


def test_a_pool_that_becomes_slower_is_followed_within_a_window() -> None:
    predictor = Predictor(default_speed("fast"))
    taught(predictor, PROFILES["fast"])
    speed = taught(predictor, PROFILES["fast"].scaled(3), rounds=-(-WINDOW // len(PROMPTS)) + 4)
    assert speed.prefill_s(2000, 16_000) == pytest.approx(3 * PROFILES["fast"].prefill(2000, 16_000), rel=0.1)


def test_the_same_samples_give_the_same_speed() -> None:
    assert taught(Predictor(), PROFILES["fast"]) == taught(Predictor(), PROFILES["fast"])
