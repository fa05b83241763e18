"""The short way through a usage object gives what the careful one gives, or leaves it to that."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxgate.inference.usage import UNKNOWN, Usage, measured
from ctxgate.inference.usage_parse import INCLUSIVE, MAX_TOKENS, ParsedUsage, parse_usage
from ctxgate.inference.usage_usual import usual_usage

SMALL = st.integers(0, 12)  # so that sums and bounds meet
FIGURES: st.SearchStrategy[Any] = st.one_of(
    SMALL, SMALL, st.sampled_from([-1, MAX_TOKENS, MAX_TOKENS + 1, 2**64, 1.0, 0.5, True, "3", None, [], {}])
)
DETAILS = ("cached_tokens", "created_cache_tokens", "cache_write_tokens", "audio_tokens", "new_detail")
RECORDS = st.fixed_dictionaries(
    {},
    optional={
        "prompt_tokens": FIGURES,
        "completion_tokens": FIGURES,
        "total_tokens": FIGURES,
        "prompt_tokens_details": st.one_of(
            st.dictionaries(st.sampled_from(DETAILS), FIGURES, max_size=3), FIGURES
        ),
        "completion_tokens_details": st.one_of(
            st.dictionaries(st.sampled_from(("reasoning_tokens", "audio_tokens")), FIGURES), FIGURES
        ),
        "cached_tokens": FIGURES,
        "input_tokens": FIGURES,
        "iterations": st.sampled_from([None, [], [{}]]),
        "cost": FIGURES,
    },
)


@st.composite
def nearly_usual(draw: st.DrawFn) -> dict[str, Any]:
    """A usage object in vLLM's shape, mostly consistent."""
    prompt, output = draw(SMALL), draw(SMALL)
    record: dict[str, Any] = {
        "prompt_tokens": prompt,
        "total_tokens": prompt + output + draw(st.sampled_from([0, 0, 0, 1])),
        "completion_tokens": output,
        "prompt_tokens_details": draw(
            st.one_of(st.none(), st.dictionaries(st.sampled_from(DETAILS[:2]), st.one_of(SMALL, st.none())))
        ),
    }
    if draw(st.booleans()):
        record["completion_tokens_details"] = draw(
            st.one_of(st.none(), st.fixed_dictionaries({}, optional={"reasoning_tokens": SMALL}))
        )
    return record


@given(
    record=st.one_of(nearly_usual(), nearly_usual(), RECORDS),
    absent_is_zero=st.booleans(),
    window=st.one_of(st.none(), SMALL),
)
def test_both_ways_agree_wherever_the_short_one_answers(
    record: dict[str, Any], absent_is_zero: bool, window: int | None
) -> None:
    short = usual_usage(json.dumps(record).encode(), cached_absent_is_zero=absent_is_zero, window=window)
    # A mapping, unlike bytes, always goes the careful way.
    careful = parse_usage(record, INCLUSIVE, cached_absent_is_zero=absent_is_zero, window=window)
    if short is not None:
        assert careful == ParsedUsage(short)
    through = parse_usage(
        json.dumps(record).encode(), INCLUSIVE, cached_absent_is_zero=absent_is_zero, window=window
    )
    assert through == careful


@given(record=RECORDS, choices=st.integers(2, 3), convention=st.sampled_from(["inclusive", "exclusive"]))
def test_several_choices_and_the_other_convention_never_go_the_short_way(
    record: dict[str, Any], choices: int, convention: str
) -> None:
    raw = json.dumps(record).encode()
    assert parse_usage(raw, convention, choices=choices) == parse_usage(record, convention, choices=choices)
    assert parse_usage(raw, "exclusive") == parse_usage(record, "exclusive")


@pytest.mark.parametrize(
    ("raw", "zero", "expected"),
    [
        (
            b'{"prompt_tokens":40,"total_tokens":43,"completion_tokens":3,'
            b'"prompt_tokens_details":{"cached_tokens":32,"created_cache_tokens":8}}',
            False,
            Usage(measured(8), measured(32), measured(3), UNKNOWN, measured(8)),
        ),
        (
            b'{"prompt_tokens":40,"total_tokens":43,"completion_tokens":3,"prompt_tokens_details":null}',
            True,
            Usage(measured(40), measured(0), measured(3)),
        ),
        (
            b'{"prompt_tokens":40,"total_tokens":43,"completion_tokens":3,"prompt_tokens_details":null,'
            b'"completion_tokens_details":{"reasoning_tokens":2}}',
            False,
            Usage(UNKNOWN, UNKNOWN, measured(3), measured(2), prompt_total=measured(40)),
        ),
    ],
)
def test_vllms_own_objects_go_the_short_way(raw: bytes, zero: bool, expected: Usage) -> None:
    assert usual_usage(raw, cached_absent_is_zero=zero, window=40) == expected


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"null",
        b"{",
        b"[" * 100_000,
        b'{"prompt_tokens":4,"total_tokens":4,"completion_tokens":0,"new":1}',
        b'{"prompt_tokens":4.0,"total_tokens":4,"completion_tokens":0}',
        b'{"prompt_tokens":"4","total_tokens":4,"completion_tokens":0}',
        b'{"prompt_tokens":true,"total_tokens":1,"completion_tokens":0}',
        b'{"prompt_tokens":5,"total_tokens":5,"completion_tokens":0}',
    ],
)
def test_anything_else_is_left_to_the_careful_way(raw: bytes) -> None:
    assert usual_usage(raw, cached_absent_is_zero=False, window=4) is None
