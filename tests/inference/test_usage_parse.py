"""Usage objects as upstreams send them, and the record each must become."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ctxgate.inference.usage import UNKNOWN, Usage, measured
from ctxgate.inference.usage_parse import ABSENT, MAX_TOKENS, never_scheduled, parse_usage


def chat(prompt: int, output: int, **details: Any) -> dict[str, Any]:
    """vLLM's and OpenAI's usage of chat and completions."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": details or None,
    }


def read(raw: Any, convention: str = "inclusive", **options: Any) -> Usage:
    parsed = parse_usage(raw, convention, **options)
    assert parsed.usage is not None, parsed.anomalies
    return parsed.usage


def figures(usage: Usage) -> tuple[int | None, ...]:
    """uncached, cached, output, written."""
    return (usage.uncached.value, usage.cached.value, usage.output.value, usage.written.value)


def test_gateways_a5_vllm_cache_hit_is_recorded() -> None:
    usage = read(chat(150_383, 304, cached_tokens=149_936))
    assert usage.cached == measured(149_936)
    assert usage.uncached == measured(447)
    assert usage.output == measured(304)
    assert usage.prompt == 150_383


def test_gateways_a7_both_conventions_give_the_same_record() -> None:
    inclusive = read(chat(1_000, 50, cached_tokens=800))
    exclusive = read({"input_tokens": 200, "cache_read_input_tokens": 800, "output_tokens": 50}, "exclusive")
    assert inclusive == exclusive
    assert figures(inclusive) == (200, 800, 50, None)


def test_gateways_a8_exclusive_record_from_an_inclusive_upstream_is_switched_and_noted() -> None:
    raw = {
        "input_tokens": 1,
        "cache_creation_input_tokens": 225,
        "cache_read_input_tokens": 965_602,
        "output_tokens": 82,
    }
    parsed = parse_usage(raw, "inclusive")
    assert parsed.anomalies == ("convention_switched",)
    assert parsed.usage is not None
    assert figures(parsed.usage) == (226, 965_602, 82, 225)
    assert parsed.usage.prompt == 965_828


def test_gateways_a8_total_proves_the_exclusive_reading() -> None:
    raw = {**chat(10, 5, cached_tokens=90), "total_tokens": 105}
    parsed = parse_usage(raw, "inclusive")
    assert parsed.anomalies == ("convention_switched",)
    assert parsed.usage is not None
    assert figures(parsed.usage) == (10, 90, 5, None)


@pytest.mark.parametrize("total", [15, 77])
def test_gateways_a8_record_without_a_consistent_reading_is_rejected(total: int) -> None:
    raw = {**chat(10, 5, cached_tokens=90), "total_tokens": total}
    parsed = parse_usage(raw, "inclusive")
    assert parsed.usage is None
    assert parsed.anomalies == ("cached_exceeds_prompt",)


def test_gateways_a8_written_beyond_the_uncached_part_is_dropped_when_the_total_is_inclusive() -> None:
    parsed = parse_usage(chat(100, 5, cached_tokens=90, created_cache_tokens=20), "inclusive")
    assert parsed.anomalies == ("written_exceeds_uncached",)
    assert parsed.usage is not None
    assert figures(parsed.usage) == (10, 90, 5, None)


@pytest.mark.parametrize("name", ["created_cache_tokens", "cache_write_tokens", "cache_creation_tokens"])
def test_gateways_a10_every_name_of_written_tokens_is_one_field(name: str) -> None:
    parsed = parse_usage(chat(100, 5, cached_tokens=64, **{name: 32}), "inclusive")
    assert parsed.usage is not None
    assert figures(parsed.usage) == (36, 64, 5, 32)
    assert parsed.unknown_fields == ()


def test_gateways_a10_top_level_written_tokens_of_an_inclusive_record() -> None:
    raw = {**chat(100, 5, cached_tokens=64), "cache_creation_input_tokens": 32}
    assert figures(read(raw)) == (36, 64, 5, 32)


def test_gateways_a10_unknown_detail_fields_are_named() -> None:
    raw = {**chat(100, 5, cached_tokens=0, quantum_tokens=3), "prompt_flux": 1}
    assert parse_usage(raw, "inclusive").unknown_fields == ("prompt_flux", "quantum_tokens")


def test_unknown_fields_are_bounded() -> None:
    raw = {**chat(1, 1), **{f"field_{n:03}": n for n in range(100)}, "x" * 500: 1}
    names = parse_usage(raw, "inclusive").unknown_fields
    assert names == tuple(f"field_{n:03}" for n in range(8))


def test_two_places_that_disagree_are_noted_and_the_detail_counts() -> None:
    raw = {**chat(100, 5, cached_tokens=64), "cache_read_input_tokens": 32}
    parsed = parse_usage(raw, "inclusive")
    assert parsed.anomalies == ("ambiguous:cached_tokens",)
    assert parsed.usage is not None
    assert parsed.usage.cached == measured(64)


def test_gateways_a14_iterations_are_summed() -> None:
    steps = [
        {
            "input_tokens": 10,
            "cache_read_input_tokens": 100,
            "cache_creation_input_tokens": 7,
            "output_tokens": 3,
        },
        {
            "input_tokens": 20,
            "cache_read_input_tokens": 200,
            "cache_creation_input_tokens": 5,
            "output_tokens": 4,
        },
        {
            "input_tokens": 1,
            "cache_read_input_tokens": 307,
            "cache_creation_input_tokens": 0,
            "output_tokens": 5,
        },
    ]
    parsed = parse_usage({**steps[0], "iterations": steps}, "exclusive")
    assert parsed.anomalies == ()
    assert parsed.usage is not None
    # uncached = 10+20+1 fresh + 7+5+0 written
    assert figures(parsed.usage) == (43, 607, 12, 12)


def test_gateways_a14_a_list_that_covers_less_than_the_record_is_not_believed() -> None:
    raw = {**chat(100, 50, cached_tokens=10), "iterations": [chat(100, 20, cached_tokens=10)]}
    parsed = parse_usage(raw, "inclusive")
    assert parsed.anomalies == ("iterations_incomplete",)
    assert parsed.usage is not None
    assert figures(parsed.usage) == (90, 10, 50, None)


def test_gateways_a14_a_figure_missing_from_one_step_is_unknown_for_all() -> None:
    steps = [chat(100, 5, cached_tokens=10), chat(200, 6)]
    usage = read({"iterations": steps})
    assert usage.cached == usage.uncached == UNKNOWN
    assert usage.prompt == 300
    assert usage.output == measured(11)


@pytest.mark.parametrize("steps", [[1], ["x"], [{"prompt_tokens": -1}]])
def test_garbage_iterations_reject_the_record(steps: list[Any]) -> None:
    assert parse_usage({**chat(1, 1), "iterations": steps}, "inclusive").usage is None


def test_gateways_b7_absent_cached_tokens_are_unknown_and_the_total_is_kept() -> None:
    usage = read(chat(150, 20))
    assert usage.cached == usage.uncached == UNKNOWN
    assert usage.prompt_total == measured(150)
    assert usage.prompt == 150


def test_gateways_b8_absent_cached_tokens_are_zero_once_the_pool_is_known_to_report() -> None:
    usage = read(chat(150, 20), cached_absent_is_zero=True)
    assert figures(usage) == (150, 0, 20, None)


def test_gateways_b8_a_null_detail_counts_as_absent() -> None:
    raw = chat(150, 20, cached_tokens=None)
    assert read(raw).cached == UNKNOWN
    assert read(raw, cached_absent_is_zero=True).cached == measured(0)


def test_gateways_b11_explicit_zero_output_is_a_value() -> None:
    usage = read(chat(1_200, 0, cached_tokens=0))
    assert usage.output == measured(0)
    assert usage.cached == measured(0)
    assert usage.uncached == measured(1_200)


def test_api_b7_and_b8_the_exclusive_prompt_is_inclusive_again_in_the_record() -> None:
    usage = read({"input_tokens": 2_000, "cache_read_input_tokens": 98_000, "output_tokens": 10}, "exclusive")
    assert usage.prompt == 100_000
    assert usage.uncached == measured(2_000)


def test_api_b13_zeros_null_and_absent_are_three_things() -> None:
    assert figures(read({"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0})) == (0, 0, 0, None)
    assert figures(read({"prompt_tokens": 5, "completion_tokens": 0})) == (None, None, 0, None)
    assert figures(read({"prompt_tokens": 5, "completion_tokens": None})) == (None, None, None, None)
    assert parse_usage(b"null", "inclusive") == ABSENT
    assert parse_usage(None, "inclusive") == ABSENT
    assert parse_usage(msgspec.Raw(b""), "inclusive") == ABSENT


def test_context_h1_cached_tokens_are_part_of_the_context_not_added_to_it() -> None:
    assert read(chat(38_196, 1, cached_tokens=38_153)).prompt == 38_196


def test_context_h3_a_running_sum_is_not_taken_for_a_prompt() -> None:
    raw = {"input_tokens": 12, "cache_read_input_tokens": 41_000_000, "output_tokens": 3}
    parsed = parse_usage(raw, "exclusive", window=200_000)
    assert parsed.usage is None
    assert parsed.anomalies == ("prompt_exceeds_window",)
    assert parse_usage(chat(200_000, 3, cached_tokens=0), "inclusive", window=200_000).usage is not None


def test_context_h4_cached_tokens_do_fill_the_window() -> None:
    usage = read({"input_tokens": 206, "cache_read_input_tokens": 98_432, "output_tokens": 1}, "exclusive")
    assert usage.prompt == 98_638


def test_responses_shape() -> None:
    raw = {
        "input_tokens": 419,
        "input_tokens_details": {
            "cached_tokens": 384,
            "cache_write_tokens": 32,
            "input_tokens_per_turn": [419],
            "cached_tokens_per_turn": [384],
        },
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 4, "tool_output_tokens": 0},
        "total_tokens": 426,
    }
    parsed = parse_usage(msgspec.json.encode(raw), "inclusive")
    assert parsed.anomalies == parsed.unknown_fields == ()
    assert parsed.usage is not None
    assert figures(parsed.usage) == (35, 384, 7, 32)
    assert parsed.usage.reasoning == measured(4)


def test_api_17_vllm_messages_without_cache_figures_tell_the_whole_prompt() -> None:
    start = read({"input_tokens": 419, "output_tokens": 0}, "exclusive")
    assert start.prompt == 419
    assert start.uncached == start.cached == UNKNOWN
    delta = read({"input_tokens": 35, "cache_read_input_tokens": 384, "output_tokens": 7}, "exclusive")
    assert figures(delta) == (35, 384, 7, None)


def test_exclusive_record_with_writes_only() -> None:
    usage = read({"input_tokens": 5, "cache_creation_input_tokens": 7, "output_tokens": 1}, "exclusive")
    assert figures(usage) == (12, None, 1, 7)


def test_reasoning_tokens_lie_inside_the_output() -> None:
    raw = {**chat(10, 9, cached_tokens=0), "completion_tokens_details": {"reasoning_tokens": 6}}
    assert read(raw).reasoning == measured(6)
    raw["completion_tokens_details"] = {"reasoning_tokens": 10}
    parsed = parse_usage(raw, "inclusive")
    assert parsed.usage is not None
    assert parsed.usage.reasoning == UNKNOWN
    assert parsed.anomalies == ("reasoning_exceeds_output",)


def test_embeddings_have_a_total_and_so_a_known_empty_output() -> None:
    usage = read({"prompt_tokens": 8, "total_tokens": 8}, cached_absent_is_zero=True)
    assert figures(usage) == (8, 0, 0, None)


def test_a_missing_prompt_follows_from_the_total() -> None:
    assert read({"completion_tokens": 3, "total_tokens": 10}).prompt == 7
    assert read({"completion_tokens": 11, "total_tokens": 10}).prompt is None


def test_a_total_that_does_not_add_up_is_noted() -> None:
    raw = {**chat(10, 5, cached_tokens=0), "total_tokens": 16}
    parsed = parse_usage(raw, "inclusive")
    assert parsed.anomalies == ("total_mismatch",)
    assert parsed.usage is not None


def test_several_choices_make_the_cached_figure_unknown() -> None:
    # vLLM reports the cached tokens of one prompt of a list, or of one of n samples
    usage = read(chat(300, 9, cached_tokens=96), choices=3, cached_absent_is_zero=True)
    assert usage.cached == usage.uncached == UNKNOWN
    assert usage.prompt == 300


@pytest.mark.parametrize("value", [-1, True, 1.5, "12", [], {}, MAX_TOKENS + 1, 2**70])
@pytest.mark.parametrize("name", ["prompt_tokens", "completion_tokens"])
def test_a_garbage_count_rejects_the_record(name: str, value: Any) -> None:
    parsed = parse_usage({**chat(10, 5), name: value}, "inclusive")
    assert parsed.usage is None
    assert parsed.anomalies == (f"bad_value:{name}",)


@pytest.mark.parametrize("value", [-1, True, 1.5, "12", [], {}, 2**70])
def test_a_garbage_detail_is_unknown_and_noted(value: Any) -> None:
    parsed = parse_usage(chat(10, 5, cached_tokens=value), "inclusive")
    assert parsed.usage is not None
    assert parsed.usage.cached == UNKNOWN
    assert parsed.usage.prompt == 10
    assert parsed.anomalies == ("bad_value:cached_tokens",)


def test_garbage_details_are_noted() -> None:
    parsed = parse_usage({**chat(10, 5), "prompt_tokens_details": [1]}, "inclusive")
    assert parsed.anomalies == ("bad_value:prompt_tokens_details",)
    assert parsed.usage is not None


@pytest.mark.parametrize(
    ("raw", "fault"),
    [
        (b"{", "malformed"),
        (b'{"prompt_tokens": 1e999}', "malformed"),
        (b"[1]", "not_an_object"),
        (b'"12"', "not_an_object"),
        (b"7", "not_an_object"),
    ],
)
def test_bytes_that_are_no_usage_object(raw: bytes, fault: str) -> None:
    parsed = parse_usage(raw, "inclusive")
    assert (parsed.usage, parsed.anomalies) == (None, (fault,))


def test_an_unknown_convention_is_a_programming_error() -> None:
    with pytest.raises(ValueError, match="convention"):
        parse_usage({}, "additive")


QUEUED = {
    "prompt_tokens": 89,
    "completion_tokens": 0,
    "total_tokens": 89,
    "prompt_tokens_details": {"cached_tokens": 0, "created_cache_tokens": 0},
}


@pytest.mark.parametrize(
    "metrics", [None, b"null", {}, b"{}", {"queue_time_ms": None, "time_to_first_token_ms": None}]
)
def test_routing_g7_a_call_aborted_in_the_queue_was_never_scheduled(metrics: Any) -> None:
    assert never_scheduled(QUEUED, metrics)
    assert never_scheduled(msgspec.Raw(msgspec.json.encode(QUEUED)), metrics)


def test_routing_g7_a_queue_time_proves_that_the_call_was_scheduled() -> None:
    assert not never_scheduled(QUEUED, {"queue_time_ms": 0.0})


def test_routing_g7_output_or_hits_prove_that_the_call_was_scheduled() -> None:
    assert not never_scheduled({**QUEUED, "completion_tokens": 1}, {})
    assert not never_scheduled({**QUEUED, "prompt_tokens_details": {"cached_tokens": 32}}, {})


def test_routing_g7_without_evidence_the_call_was_scheduled() -> None:
    assert not never_scheduled(None, None)
    assert not never_scheduled({"prompt_tokens": 89}, None)
    assert not never_scheduled({**QUEUED, "completion_tokens": False}, None)
    assert not never_scheduled(QUEUED, None, metrics_expected=False)
    assert not never_scheduled(QUEUED, b"{broken")
