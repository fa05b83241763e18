"""What an engine tells of its load, of all its clients: from its `/metrics`, or from a header of an answer.

Both are read where they stand, without a parser of the whole text. What is absent or no number is unknown.
"""

from __future__ import annotations

import json
import math
import re
from typing import Final

from msgspec.structs import replace

from ctxgate.inference.record import Record

LOAD_HEADER: Final = "endpoint-load-metrics"
ASK_HEADER: Final = "endpoint-load-metrics-format"
"""A request that carries it, with the value `json`, is answered with LOAD_HEADER."""

_LONGEST_HEADER: Final = 4096
_MOST: Final = 10**9
"""More requests than any engine has."""

_LABELS: Final = rb"(?:\{(?:[^}\"\n]|\"(?:[^\"\\\n]|\\.)*\")*\})?"
_GAUGES: Final = tuple(
    re.compile(rb"^vllm:" + name + _LABELS + rb"[ \t]+(\S+)", re.MULTILINE)
    for name in (b"num_requests_running", b"num_requests_waiting", b"kv_cache_usage_perc")
)
_STARTED: Final = re.compile(rb"^process_start_time_seconds" + _LABELS + rb"[ \t]+(\S+)", re.MULTILINE)
_QUERIES: Final = re.compile(rb"^vllm:prefix_cache_queries_total" + _LABELS + rb"[ \t]+(\S+)", re.MULTILINE)
_CACHE_CONFIG: Final = re.compile(rb"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_LABEL: Final = re.compile(rb'(\w+)="((?:[^"\\]|\\.)*)"')


class EngineLoad(Record, frozen=True):
    """Requests that run and wait, the used part of the key-value cache (0..1), and its size in tokens."""

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    kv_tokens: int | None = None

    def updated(self, later: EngineLoad) -> EngineLoad:
        """The later figures, and these where it has none."""
        known = {
            name: value for name in self.__struct_fields__ if (value := getattr(later, name)) is not None
        }
        return replace(self, **known)


class Life(Record, frozen=True):
    """When an engine's process began (seconds), and how many tokens it has looked up in its cache since."""

    started_s: float | None = None
    queries: float | None = None

    def follows(self, before: Life) -> bool:
        """Whether it is another life than the one told before; False where the two tell too little."""
        if None not in (self.started_s, before.started_s) and self.started_s != before.started_s:
            return True
        return self.queries is not None and before.queries is not None and self.queries < before.queries


def life(text: bytes) -> Life:
    """The life of the engine whose Prometheus text this is; of several behind one server the sum."""
    started, queries = (
        [value for told in one.findall(text) if (value := _number(told)) is not None]
        for one in (_STARTED, _QUERIES)
    )
    return Life(max(started) if started else None, sum(queries) if queries else None)


def of_metrics(text: bytes) -> EngineLoad:
    """The load in Prometheus text. Requests of several engines behind one server are summed."""
    running, waiting, usage = (
        [value for told in one.findall(text) if (value := _number(told)) is not None] for one in _GAUGES
    )
    return EngineLoad(
        _requests(sum(running)) if running else None,
        _requests(sum(waiting)) if waiting else None,
        min(max(usage), 1.0) if usage else None,
        kv_tokens(cache_config(text)),
    )


def of_header(value: str) -> EngineLoad | None:
    """The load in the header LOAD_HEADER, `JSON {"named_metrics": {...}}`; None where it tells none."""
    kind, _, document = value[:_LONGEST_HEADER].partition(" ")
    if kind != "JSON":
        return None
    try:
        named = json.loads(document)["named_metrics"]
        waiting, usage = named.get("num_requests_waiting"), named.get("kv_cache_usage_perc")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    waiting, usage = (
        one if isinstance(one, int | float) and -math.inf < one < math.inf else None
        for one in (waiting, usage)
    )
    if waiting is usage is None:
        return None
    return EngineLoad(
        waiting=None if waiting is None else _requests(waiting),
        kv_usage=None if usage is None else float(min(max(usage, 0.0), 1.0)),
    )


def cache_config(text: bytes) -> dict[str, str]:
    """The labels of `vllm:cache_config_info` in Prometheus text, empty where it is not there."""
    found = _CACHE_CONFIG.search(text)
    labels = _LABEL.findall(found[1]) if found else []
    return {name.decode(): value.decode("utf-8", "replace") for name, value in labels}


def kv_tokens(labels: dict[str, str]) -> int | None:
    """How many tokens the key-value cache holds, by the labels of its configuration."""
    told = _whole(labels.get("kv_cache_size_tokens"))
    if told:
        return told
    blocks, block = _whole(labels.get("num_gpu_blocks")), _whole(labels.get("block_size"))
    return blocks * block if blocks and block else None


def _requests(told: float) -> int:
    """A number of requests, within what can be."""
    return int(min(max(told, 0), _MOST))


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdecimal() and len(text) < 19 else None


def _number(text: bytes) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None
