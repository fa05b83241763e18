"""A pool's profile and speed: what is given counts, the rest is the profile's; mistakes have their line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from config_texts import edited, problems, read_text
from ctxgate.inference.twin_profile import PROFILES
from ctxgate.routing.snapshot import Speed

if TYPE_CHECKING:
    from ctxgate.gateway.config import Pool

REPLICAS = '    replicas: ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]\n'


def text(fields: str) -> str:
    """The valid text with more fields of the pool `standard`, on line 4 and on."""
    return edited(REPLICAS, REPLICAS + f"    {fields}\n")


def pool(fields: str) -> Pool:
    return read_text(text(fields)).config.pools["standard"]


def of_profile(name: str) -> Speed:
    shape = PROFILES[name]
    return Speed(
        shape.linear_s,
        shape.attention_s,
        shape.step_s,
        shape.sequence_s,
        shape.context_s,
        slots=shape.max_num_seqs,
    )


def test_routing_f2_of_a_pool_of_which_nothing_is_said_nothing_is_known() -> None:
    found = pool("abort: true")
    assert found.profile is None
    assert found.speed is None


@pytest.mark.parametrize("name", ["fast", "standard"])
def test_a_profile_brings_its_usual_speed(name: str) -> None:
    found = pool(f"profile: {name}")
    assert found.profile == name
    assert found.speed == of_profile(name)


def test_what_is_given_counts_in_its_own_unit() -> None:
    found = pool(
        "speed: {prefill_us_per_token: 12.5, attention_ns_per_pair: 0.05, step_ms: 4, sequence_ms: 0.25,\n"
        "      context_ns_per_token: 3, max_num_seqs: 8}"
    )
    assert found.profile is None
    assert found.speed == Speed(12.5e-6, 5e-11, 0.004, 0.00025, 3e-9, slots=8)


def test_the_rest_is_that_of_the_profile() -> None:
    speed = pool("profile: fast\n    speed: {step_ms: 5}").speed
    assert speed is not None
    usual = PROFILES["fast"]
    assert (speed.step_s, speed.linear_s, speed.slots) == (0.005, usual.linear_s, usual.max_num_seqs)


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ("profile: quick", "profile", 'must be "fast" or "standard"'),
        ("speed: {step_ms: 0}", "speed.step_ms", "must be a number of milliseconds from 0.001 to 60,000"),
        (
            "speed: {prefill_us_per_token: -1}",
            "speed.prefill_us_per_token",
            "must be a number of microseconds from 0.001 to 1,000,000",
        ),
        (
            "speed: {max_num_seqs: 0}",
            "speed.max_num_seqs",
            "must be a whole number from 1 to 100000",
        ),
        (
            "speed: {step_s: 1}",
            "speed.step_s",
            "is not a known field; did you mean step_ms?",
        ),
    ],
)
def test_a_mistake_is_told_with_its_line(fields: str, field: str, message: str) -> None:
    (only,) = problems(text(fields))
    assert (only.line, only.field, only.message) == (4, f"pools.standard.{field}", message)
