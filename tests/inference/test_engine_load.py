"""What an engine tells of its load, in its metrics and in a header."""

from __future__ import annotations

import pytest

from ctxgate.inference.engine_load import (
    EngineLoad,
    Life,
    cache_config,
    kv_tokens,
    life,
    of_header,
    of_metrics,
)

# As vLLM 0.32 prints them.
TEXT = rb"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a \"b\" } 7"} 3.0
vllm:num_requests_running{engine="1",model_name="tiny"} 2.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="tiny"} 0.0
vllm:num_requests_waiting{engine="1",model_name="tiny"} 11.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 99.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="tiny"} 0.75
vllm:cache_config_info{block_size="32",engine="0",kv_cache_size_tokens="9600",num_gpu_blocks="300"} 1.0
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 123456.0
"""


def test_the_engines_of_a_server_are_summed_and_the_fullest_cache_counts() -> None:
    assert of_metrics(TEXT) == EngineLoad(running=5, waiting=11, kv_usage=0.75, kv_tokens=9600)


@pytest.mark.parametrize(
    "text",
    [b"", b"\xff\x00", b"vllm:num_requests_running{} NaN\n", b"vllm:num_requests_running -1\n", b"x" * 4096],
)
def test_what_is_not_told_is_unknown_and_not_zero(text: bytes) -> None:
    assert of_metrics(text) == EngineLoad()


def test_idle_is_zero_and_not_unknown() -> None:
    text = b"vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0.0\n"
    assert of_metrics(text) == EngineLoad(0, 0, 0.0)


@pytest.mark.parametrize(
    ("labels", "tokens"),
    [
        ({"kv_cache_size_tokens": "9600", "num_gpu_blocks": "1", "block_size": "16"}, 9600),
        ({"num_gpu_blocks": "300", "block_size": "16"}, 4800),
        ({"num_gpu_blocks": "None", "block_size": "16"}, None),
        ({"kv_cache_size_tokens": "None", "num_gpu_blocks": "0", "block_size": "16"}, None),
        ({}, None),
    ],
)
def test_the_caches_size_is_told_or_follows_from_its_blocks(
    labels: dict[str, str], tokens: int | None
) -> None:
    assert kv_tokens(labels) == tokens


def test_the_labels_of_the_cache_are_read_with_their_escapes() -> None:
    assert cache_config(rb'vllm:cache_config_info{a="1",b="x\"y"} 1') == {"a": "1", "b": r"x\"y"}
    assert cache_config(b"vllm:cache_config_information 1") == {}


def test_a_header_tells_what_waits_and_how_full_the_cache_is() -> None:
    value = 'JSON {"named_metrics": {"kv_cache_usage_perc": 0.4, "num_requests_waiting": 2.0}}'
    assert of_header(value) == EngineLoad(waiting=2, kv_usage=0.4)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "JSON",
        "JSON {",
        "JSON []",
        'JSON {"named_metrics": 7}',
        'JSON {"named_metrics": {}}',
        'JSON {"named_metrics": {"num_requests_waiting": "2"}}',
        'JSON {"named_metrics": {"num_requests_waiting": NaN}}',
        "TEXT named_metrics.num_requests_waiting=2.0",
        "JSON " + "[" * 5000,
    ],
)
def test_a_header_of_another_shape_tells_nothing(value: str) -> None:
    assert of_header(value) is None


def test_later_figures_count_and_absent_ones_stay() -> None:
    before = EngineLoad(3, 1, 0.5, 9600)
    assert before.updated(EngineLoad(waiting=0, kv_usage=0.1)) == EngineLoad(3, 0, 0.1, 9600)


LIVES = b"""process_start_time_seconds 1.75e+09
vllm:prefix_cache_queries_total{engine="0"} 100.0
vllm:prefix_cache_queries_total{engine="1"} 20.0
vllm:external_prefix_cache_queries_total{engine="0"} 7.0
"""


def test_the_life_of_an_engine_is_when_it_began_and_what_it_has_looked_up() -> None:
    assert life(LIVES) == Life(1.75e9, 120.0)
    assert life(b"") == Life()


@pytest.mark.parametrize(
    ("before", "after", "another"),
    [
        (Life(5.0, 100.0), Life(5.0, 100.0), False),
        (Life(5.0, 100.0), Life(5.0, 101.0), False),
        (Life(5.0, 100.0), Life(6.0, 900.0), True),
        (Life(None, 100.0), Life(None, 99.0), True),
        (Life(None, 100.0), Life(6.0, None), False),
        (Life(), Life(5.0, 0.0), False),
        (Life(5.0, 100.0), Life(), False),
    ],
)
def test_a_restart_shows_in_a_new_beginning_or_a_counter_that_falls(
    before: Life, after: Life, another: bool
) -> None:
    assert after.follows(before) is another


def test_figures_that_no_engine_has_are_bounded() -> None:
    text = b'vllm:num_requests_running{e="0"} 1e308\nvllm:num_requests_running{e="1"} 1e308\n'
    assert of_metrics(text) == EngineLoad(running=10**9)
    many = 10**400
    told = f'{{"named_metrics": {{"num_requests_waiting": {many}, "kv_cache_usage_perc": {many}}}}}'
    assert of_header(f"JSON {told}") == EngineLoad(waiting=10**9, kv_usage=1.0)


def test_labels_end_with_their_line() -> None:
    text = b"vllm:num_requests_running{a\n" * 100_000  # each read to the end: hours
    assert of_metrics(text + b'vllm:num_requests_running{e="0"} 2\n') == EngineLoad(running=2)
