"""The twin's `/metrics`: the samples a gateway reads, under vLLM's names and labels."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from ctxgate.inference.engine_load import ASK_HEADER, LOAD_HEADER

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ctxgate.inference.twin import Twin

ENGINE: Final = "0"
FINISH_REASONS: Final = ("stop", "length", "abort", "error", "repetition")


def exposition(twin: Twin, model: str, started: float) -> str:
    """Prometheus text; `started` (seconds since the epoch) is what the `_created` gauges say."""
    labels = {"engine": ENGINE, "model_name": model}
    lines: list[str] = []
    for name, value in _gauges(twin).items():
        lines += _family(name, "gauge", [(labels, value)])
    lines += _family("cache_config_info", "gauge", [(_cache_config(twin), 1.0)])
    for name, samples in _counters(twin).items():
        labelled = [(labels | extra, value) for extra, value in samples]
        lines += _family(f"{name}_total", "counter", labelled)
        lines += _family(f"{name}_created", "gauge", [(own, started) for own, _ in labelled])
    return "\n".join(lines) + "\n"


def _gauges(twin: Twin) -> dict[str, float]:
    return {
        "num_requests_running": twin.running,
        "num_requests_waiting": twin.waiting,
        "kv_cache_usage_perc": twin.pool.usage,
    }


def load_of(headers: Mapping[str, str], twin: Twin) -> dict[str, str]:
    """The load beside a whole answer, in the form that its request's headers ask for; a stream has none."""
    told = {name: float(value) for name, value in _gauges(twin).items() if name != "num_requests_running"}
    match headers.get(ASK_HEADER, "").lower():
        case "json":
            return {LOAD_HEADER: f"JSON {json.dumps({'named_metrics': told})}"}
        case "text":
            parts = ", ".join(f"named_metrics.{name}={value}" for name, value in told.items())
            return {LOAD_HEADER: f"TEXT {parts}"}
        case _:
            return {}


def _counters(twin: Twin) -> dict[str, list[tuple[dict[str, str], float]]]:
    totals = twin.totals
    computed = totals.prompt_tokens - totals.prompt_tokens_cached
    return {
        "num_preemptions": [({}, totals.preemptions)],
        "prefix_cache_queries": [({}, totals.prefix_cache_queries)],
        "prefix_cache_hits": [({}, totals.prefix_cache_hits)],
        "prompt_tokens": [({}, totals.prompt_tokens)],
        "prompt_tokens_by_source": [
            ({"source": "local_compute"}, computed),
            ({"source": "local_cache_hit"}, totals.prompt_tokens_cached),
            ({"source": "external_kv_transfer"}, 0),
        ],
        "prompt_tokens_cached": [({}, totals.prompt_tokens_cached)],
        "generation_tokens": [({}, totals.generation_tokens)],
        "request_success": [
            ({"finished_reason": reason}, totals.finished.get(reason, 0)) for reason in FINISH_REASONS
        ],
    }


def _cache_config(twin: Twin) -> dict[str, str]:
    return {
        "block_size": str(twin.block_size),
        "enable_prefix_caching": "True",
        "engine": ENGINE,
        "kv_cache_size_tokens": str((twin.pool.size - 1) * twin.block_size),
        "num_gpu_blocks": str(twin.pool.size),
        "prefix_caching_hash_algo": "sha256",
    }


def _family(name: str, kind: str, samples: Iterable[tuple[Mapping[str, str], float]]) -> list[str]:
    lines = [f"# TYPE vllm:{name} {kind}"]
    for labels, value in samples:
        inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in sorted(labels.items()))
        lines.append(f"vllm:{name}{{{inside}}} {float(value)!r}")
    return lines


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
