"""Usage over a stream: the last snapshot counts, choices add up, nothing is summed over time."""

from __future__ import annotations

from typing import Any

import msgspec

from ctxgate.inference.usage import UNKNOWN, Usage, estimated, measured
from ctxgate.inference.usage_meter import UsageDialect, UsageMeter, lower_bound, merge


def usage(prompt: int, output: int, cached: int | None = None) -> msgspec.Raw:
    record: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
    }
    if cached is not None:
        record["prompt_tokens_details"] = {"cached_tokens": cached}
    return msgspec.Raw(msgspec.json.encode(record))


def result(meter: UsageMeter) -> Usage:
    parsed = meter.result()
    assert parsed.usage is not None, parsed.anomalies
    return parsed.usage


def test_gateways_b4_a_growing_usage_object_is_not_summed() -> None:
    meter = UsageMeter()
    for output in (1, 15):
        meter.add(usage(48, output), choice=0)
    assert result(meter).output == measured(15)


def test_gateways_b5_the_last_running_snapshot_outlives_a_final_null() -> None:
    meter = UsageMeter()
    for output in (10, 50, 100):
        meter.add(usage(48, output), choice=0)
    meter.add(msgspec.Raw(b"null"))
    meter.add(None)
    assert result(meter).output == measured(100)
    assert result(meter).prompt == 48


def test_gateways_b5_forty_eight_in_sixteen_out_stay_that() -> None:
    meter = UsageMeter()
    for output in range(17):
        meter.add(usage(48, output), choice=0)
    meter.add(usage(48, 16, cached=32))
    assert result(meter) == Usage(measured(16), measured(32), measured(16))


def test_gateways_b8_routing_g5_running_snapshots_leave_the_cached_part_open() -> None:
    meter = UsageMeter(UsageDialect(cached_absent_is_zero=True))
    meter.add(usage(48, 3), choice=0)
    assert result(meter).cached == UNKNOWN
    meter.add(usage(48, 4))
    assert result(meter).cached == measured(0)


def test_gateways_c6_the_last_seen_snapshot_of_a_cut_stream_is_kept() -> None:
    meter = UsageMeter()
    for output in range(1, 8):
        meter.add(usage(300, output), choice=0)
    assert not meter.closed
    assert result(meter) == Usage(UNKNOWN, UNKNOWN, measured(7), prompt_total=measured(300))


def test_usage_twice_counts_once() -> None:
    meter = UsageMeter()
    meter.add(usage(48, 16, cached=32))
    meter.add(usage(48, 16, cached=32))
    assert result(meter) == Usage(measured(16), measured(32), measured(16))


def test_usage_in_the_first_chunk_only() -> None:
    meter = UsageMeter()
    meter.add(usage(48, 16, cached=32), choice=0)
    assert result(meter) == Usage(measured(16), measured(32), measured(16))


def test_no_usage_at_all() -> None:
    meter = UsageMeter()
    assert meter.result().usage is None
    assert meter.result().anomalies == ()


def test_a_garbage_snapshot_does_not_erase_the_one_before() -> None:
    meter = UsageMeter()
    for output in range(1, 6):
        meter.add(usage(48, output), choice=0)
    meter.add(msgspec.Raw(b'{"prompt_tokens":-3,"completion_tokens":9}'), choice=0)
    assert result(meter).output == measured(5)
    assert meter.result().anomalies == ("bad_value:prompt_tokens",)


def test_running_figures_of_several_choices_add_up_but_their_prompt_counts_once() -> None:
    # vLLM's running usage counts the chunk's own choice only
    meter = UsageMeter(UsageDialect(choices=2))
    for output in range(1, 6):
        meter.add(usage(40, output), choice=0)
        meter.add(usage(40, 2 * output), choice=1)
    assert result(meter).output == measured(15)
    assert result(meter).prompt_total == measured(40)


def test_a_choice_that_was_never_seen_makes_the_sum_an_estimate() -> None:
    meter = UsageMeter(UsageDialect(choices=2))
    meter.add(usage(40, 5), choice=1)
    assert result(meter).output == estimated(5)
    assert result(meter).prompt_total == measured(40)


def test_running_figures_of_several_prompts_add_their_prompts() -> None:
    # two prompts with two choices each: indexes 0, 1 are the first prompt's
    meter = UsageMeter(UsageDialect(choices=4, prompts=2))
    for choice, prompt in ((0, 10), (1, 10), (2, 30), (3, 30)):
        meter.add(usage(prompt, 1), choice=choice)
    assert result(meter).prompt_total == measured(40)
    assert result(meter).output == measured(4)


def test_a_prompt_that_was_never_seen_makes_the_prompt_an_estimate() -> None:
    meter = UsageMeter(UsageDialect(choices=2, prompts=2))
    meter.add(usage(10, 1), choice=0)
    assert result(meter).prompt_total == estimated(10)


def test_the_closing_figure_outranks_the_running_ones_of_all_choices() -> None:
    meter = UsageMeter(UsageDialect(choices=2))
    meter.add(usage(40, 5), choice=0)
    meter.add(usage(40, 6), choice=1)
    meter.add(usage(40, 12, cached=32))
    assert result(meter) == Usage(UNKNOWN, UNKNOWN, measured(12), prompt_total=measured(40))


def test_api_17_messages_of_vllm_start_with_the_total_and_end_with_the_split() -> None:
    meter = UsageMeter(UsageDialect(convention="exclusive"))
    meter.add({"input_tokens": 419, "output_tokens": 0})
    meter.add({"input_tokens": 35, "cache_read_input_tokens": 384, "output_tokens": 7})
    assert result(meter) == Usage(measured(35), measured(384), measured(7))


def test_a_later_snapshot_that_tells_the_output_only_keeps_the_prompt() -> None:
    meter = UsageMeter(UsageDialect(convention="exclusive"))
    meter.add({"input_tokens": 35, "cache_read_input_tokens": 384, "output_tokens": 1})
    for output in (3, 5, 9):
        meter.add({"output_tokens": output})
    assert result(meter) == Usage(measured(35), measured(384), measured(9))


def test_merge_keeps_an_earlier_split_only_if_the_total_is_the_same() -> None:
    split = Usage(measured(16), measured(32), measured(1))
    same = Usage(UNKNOWN, UNKNOWN, measured(2), prompt_total=measured(48))
    other = Usage(UNKNOWN, UNKNOWN, measured(2), prompt_total=measured(50))
    assert merge(split, same) == Usage(measured(16), measured(32), measured(2))
    assert merge(split, other) == other


def test_merge_keeps_the_earlier_output_when_the_later_has_none() -> None:
    early = Usage(UNKNOWN, UNKNOWN, measured(7), reasoning=measured(3))
    late = Usage(measured(1), measured(2), UNKNOWN)
    assert merge(early, late) == Usage(measured(1), measured(2), measured(7), reasoning=measured(3))


def test_lower_bound_marks_a_measured_output_only() -> None:
    assert lower_bound(Usage(UNKNOWN, UNKNOWN, measured(3))).output == estimated(3)
    assert lower_bound(Usage(UNKNOWN, UNKNOWN, UNKNOWN)).output == UNKNOWN
