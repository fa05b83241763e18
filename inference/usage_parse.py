"""Usage objects of every dialect, read into one record.

Two conventions exist. *Inclusive* (OpenAI and vLLM: chat, completions, responses): the prompt count
contains the cached tokens. *Exclusive* (Anthropic messages): `input_tokens` is what is left after cache
reads and cache writes. Which one an upstream speaks is declared, not guessed; a record that contradicts
the declaration is read the other way where its own numbers allow that, else rejected.

Absent and null mean unknown; an explicit zero is a measurement. A rejected record yields no usage, and
every oddity is named in `anomalies`, so that it can be counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import msgspec

from ctxgate.inference.record import Record
from ctxgate.inference.usage import UNKNOWN, Count, Usage, measured
from ctxgate.inference.usage_usual import LARGEST, usual_usage

INCLUSIVE: Final = "inclusive"
EXCLUSIVE: Final = "exclusive"
MAX_TOKENS: Final = LARGEST

RawUsage: TypeAlias = Mapping[str, Any] | bytes | msgspec.Raw | None

_PROMPT: Final = ("prompt_tokens", "input_tokens")
_OUTPUT: Final = ("completion_tokens", "output_tokens")
_PROMPT_DETAILS: Final = ("prompt_tokens_details", "input_tokens_details")
_OUTPUT_DETAILS: Final = ("completion_tokens_details", "output_tokens_details")
_CACHED_DETAIL: Final = ("cached_tokens",)
_CACHED: Final = ("cache_read_input_tokens", "cached_tokens", "prompt_cache_hit_tokens")
_WRITTEN_DETAIL: Final = ("created_cache_tokens", "cache_write_tokens", "cache_creation_tokens")
_WRITTEN: Final = ("cache_creation_input_tokens",)
_REASONING: Final = ("reasoning_tokens",)
_KNOWN: Final = frozenset(_PROMPT + _OUTPUT + _PROMPT_DETAILS + _OUTPUT_DETAILS + _CACHED + _WRITTEN) | {
    "total_tokens",
    "iterations",
    "cache_creation",
    "prompt_cache_miss_tokens",
    "server_tool_use",
    "service_tier",
}
_KNOWN_PROMPT_DETAILS: Final = frozenset(_CACHED_DETAIL + _WRITTEN_DETAIL) | {
    "audio_tokens",
    "cached_tokens_per_turn",
    "image_tokens",
    "input_tokens_per_turn",
    "multimodal_tokens",
    "text_tokens",
    "video_tokens",
}
_KNOWN_OUTPUT_DETAILS: Final = frozenset(_REASONING) | {
    "accepted_prediction_tokens",
    "audio_tokens",
    "image_tokens",
    "output_tokens_per_turn",
    "rejected_prediction_tokens",
    "text_tokens",
    "tool_output_tokens",
    "tool_output_tokens_per_turn",
}
_MAX_UNKNOWN_FIELDS: Final = 8
_NOTHING: Final[Mapping[str, Any]] = {}


class ParsedUsage(Record, frozen=True):
    """What a usage object said.

    `usage` is None when there was none, or when it was rejected (then `anomalies` says why).
    `unknown_fields` names members that no rule reads (at most eight, sorted), so that a new field of an
    upstream is noticed.
    """

    usage: Usage | None = None
    anomalies: tuple[str, ...] = ()
    unknown_fields: tuple[str, ...] = ()


ABSENT: Final = ParsedUsage()


def parse_usage(
    raw: RawUsage,
    convention: str,
    *,
    cached_absent_is_zero: bool = False,
    choices: int = 1,
    window: int | None = None,
) -> ParsedUsage:
    """Read one usage object; never raises on what an upstream sent.

    `convention` is "inclusive" or "exclusive". `cached_absent_is_zero` is for upstreams that are known
    to report hits and leave a zero out. Of a call with several `choices`, over all its prompts, the
    cached figure is unknown: vLLM reports that of one of them, and with n > 1 even of a sibling that
    hit what the first one had just written. A prompt longer than the model's `window`, where that is
    given, is no prompt (relays report running sums) and rejects the record.
    """
    if convention not in (INCLUSIVE, EXCLUSIVE):
        raise ValueError(f"unknown usage convention: {convention!r}")
    if convention == INCLUSIVE and choices == 1 and isinstance(raw, bytes | msgspec.Raw):
        usual = usual_usage(raw, cached_absent_is_zero=cached_absent_is_zero, window=window)
        if usual is not None:
            return ParsedUsage(usual)
    record, fault = decode_object(raw)
    if record is None:
        return ParsedUsage(anomalies=(fault,)) if fault else ABSENT
    reading = _Reading(convention, cached_absent_is_zero, cached_is_partial=choices > 1)
    usage = reading.all_iterations(record)
    if usage is not None and window is not None and _less(window * choices, usage.prompt):
        reading.anomalies.append("prompt_exceeds_window")
        usage = None
    unknown = tuple(sorted(reading.unknown_fields)[:_MAX_UNKNOWN_FIELDS])
    return ParsedUsage(usage, tuple(dict.fromkeys(reading.anomalies)), unknown)


def decode_object(raw: RawUsage) -> tuple[Mapping[str, Any] | None, str]:
    """A JSON object as a mapping, or None with the fault; null and nothing are no fault ("")."""
    if raw is None or isinstance(raw, Mapping):
        return raw, ""
    data = bytes(raw)
    if not data or data == b"null":
        return None, ""
    try:
        record = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return None, "malformed"
    if not isinstance(record, dict):
        return None, "not_an_object" if record is not None else ""
    return record, ""


def never_scheduled(usage: RawUsage, metrics: RawUsage, *, metrics_expected: bool = True) -> bool:
    """Whether vLLM answered without having computed anything: the call was aborted while it waited.

    Its usage still tells the prompt's length, but completion and cached counts are zero and the
    per-request metrics hold no queue time; the engine's own counters skip such a call, and so must its
    price. `metrics_expected` is False where the replica reports no metrics for this call (its flag is
    off, or several choices were asked for); then their absence proves nothing. Not meant for
    embeddings, which never have a completion.
    """
    record, _ = decode_object(usage)
    if record is None or not metrics_expected:
        return False
    details = record.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, Mapping) else None
    if type(record.get("completion_tokens")) is not int or record["completion_tokens"] or cached:
        return False
    timing, fault = decode_object(metrics)
    return not fault and (timing is None or timing.get("queue_time_ms") is None)


@dataclass(slots=True)
class _Figures:
    """A record's numbers as reported, before the convention is applied."""

    prompt: int | None
    cached: int | None
    written: int | None
    output: int | None
    reasoning: int | None
    total: int | None


class _Rejected(Exception):
    """The record contradicts itself."""


@dataclass(slots=True)
class _Reading:
    """One parse: the rules in force, and the oddities met so far."""

    convention: str
    cached_absent_is_zero: bool
    cached_is_partial: bool
    anomalies: list[str] = field(default_factory=list)
    unknown_fields: set[str] = field(default_factory=set)

    def all_iterations(self, record: Mapping[str, Any]) -> Usage | None:
        """The record's usage: the sum over its iterations where it lists any, else its own figures."""
        try:
            own = self.usage(self.figures(record))
            iterations = record.get("iterations")
            if not isinstance(iterations, list) or not iterations:
                return own
            if not all(isinstance(step, Mapping) for step in iterations):
                raise _Rejected("bad_value:iterations")
            return self.larger(_sum([self.usage(self.figures(step)) for step in iterations]), own)
        except _Rejected as rejected:
            self.anomalies.append(str(rejected))
            return None

    def larger(self, summed: Usage, own: Usage) -> Usage:
        """The iterations' sum, unless the record's own figures show that the list is incomplete."""
        if _less(summed.prompt, own.prompt) or _less(summed.output.value, own.output.value):
            self.anomalies.append("iterations_incomplete")
            return own
        return summed

    def figures(self, record: Mapping[str, Any]) -> _Figures:
        """Validate and pick the numbers. A bad prompt or output count rejects the record."""
        prompt_details = self.details(record, _PROMPT_DETAILS)
        output_details = self.details(record, _OUTPUT_DETAILS)
        self.note_unknown(record, prompt_details, output_details)
        figures = _Figures(
            prompt=self.first(record, _PROMPT, reject=True),
            cached=self.agreed((prompt_details, _CACHED_DETAIL), (record, _CACHED)),
            written=self.agreed((prompt_details, _WRITTEN_DETAIL), (record, _WRITTEN)),
            output=self.first(record, _OUTPUT, reject=True),
            reasoning=self.first(output_details, _REASONING),
            total=self.first(record, ("total_tokens",)),
        )
        if _less(figures.output, figures.reasoning):
            figures.reasoning = None
            self.anomalies.append("reasoning_exceeds_output")
        if self.cached_is_partial:
            figures.cached = figures.written = None
        elif figures.cached is None and self.cached_absent_is_zero:
            figures.cached = 0
        return figures

    def details(self, record: Mapping[str, Any], names: tuple[str, ...]) -> Mapping[str, Any]:
        for name in names:
            value = record.get(name)
            if isinstance(value, Mapping):
                return value
            if value is not None:
                self.anomalies.append(f"bad_value:{name}")
        return _NOTHING

    def note_unknown(self, *objects: Mapping[str, Any]) -> None:
        for found, known in zip(objects, (_KNOWN, _KNOWN_PROMPT_DETAILS, _KNOWN_OUTPUT_DETAILS), strict=True):
            if not known.issuperset(found):
                self.unknown_fields.update(str(name)[:64] for name in found if name not in known)

    def first(self, found: Mapping[str, Any], names: tuple[str, ...], *, reject: bool = False) -> int | None:
        """The first of these members that has a value; a bad value is unknown, or rejects the record."""
        for name in names:
            value = found.get(name)
            if value is None:
                continue
            if type(value) is int and 0 <= value <= MAX_TOKENS:
                return value
            if reject:
                raise _Rejected(f"bad_value:{name}")
            self.anomalies.append(f"bad_value:{name}")
        return None

    def agreed(self, *places: tuple[Mapping[str, Any], tuple[str, ...]]) -> int | None:
        """A figure that may stand in several places: the first one's, and a note when they differ."""
        values = [self.first(found, (name,)) for found, names in places for name in names]
        known = [value for value in values if value is not None]
        if any(value != known[0] for value in known):
            self.anomalies.append(f"ambiguous:{places[0][1][0]}")
        return known[0] if known else None

    def usage(self, figures: _Figures) -> Usage:
        """Apply the convention. Raises _Rejected when no reading of the record is consistent."""
        usage = self.inclusive(figures) if self.convention == INCLUSIVE else _exclusive(figures)
        prompt, output = usage.prompt, usage.output.value
        if prompt is not None and output is not None and figures.total not in (None, prompt + output):
            self.anomalies.append("total_mismatch")
        return usage

    def inclusive(self, figures: _Figures) -> Usage:
        if figures.prompt is None:
            figures.prompt = _rest(figures.total, figures.output)
        if figures.output is None:  # embeddings: prompt and total only
            figures.output = _rest(figures.total, figures.prompt)
        if figures.prompt == 0 and figures.cached is None:
            figures.cached = 0
        prompt, cached, written = figures.prompt, figures.cached, figures.written or 0
        if prompt is None or cached is None:
            return _usage(figures, None, cached, None, prompt)
        if cached + written <= prompt:
            return _usage(figures, prompt - cached, cached, figures.written, None)
        return self.contradiction(figures, prompt, cached, written)

    def contradiction(self, figures: _Figures, prompt: int, cached: int, written: int) -> Usage:
        """More cached and written tokens than prompt: read it as exclusive, or drop what cannot be."""
        output, total = figures.output or 0, figures.total
        if total is None or total == prompt + cached + written + output:
            self.anomalies.append("convention_switched")
            return _exclusive(figures)
        if total == prompt + output and cached <= prompt:
            self.anomalies.append("written_exceeds_uncached")
            return _usage(figures, prompt - cached, cached, None, None)
        raise _Rejected("cached_exceeds_prompt")


def _exclusive(figures: _Figures) -> Usage:
    """`prompt` is what is left after reads and writes; without cache figures it may be the whole prompt.

    vLLM's messages route subtracts only what it reports, so a record without both cache figures tells
    the total and leaves the split unknown.
    """
    prompt, cached, written = figures.prompt, figures.cached, figures.written
    if prompt is None:
        return _usage(figures, None, cached, None, None)
    if cached is None and written is None:
        return _usage(figures, None, None, None, prompt)
    return _usage(figures, prompt + (written or 0), cached, written, None)


def _usage(
    figures: _Figures, uncached: int | None, cached: int | None, written: int | None, total: int | None
) -> Usage:
    return Usage(
        uncached=_count(uncached),
        cached=_count(cached),
        output=_count(figures.output),
        reasoning=_count(figures.reasoning),
        written=_count(written),
        prompt_total=_count(total),
    )


def _count(value: int | None) -> Count:
    return UNKNOWN if value is None else measured(value)


def _rest(total: int | None, part: int | None) -> int | None:
    return None if total is None or part is None or part > total else total - part


def _less(one: int | None, other: int | None) -> bool:
    return one is not None and other is not None and one < other


def _sum(parts: list[Usage]) -> Usage:
    """Sums over the steps of one reply; a figure that one step leaves out is unknown for all."""
    uncached = _total([part.uncached.value for part in parts])
    cached = _total([part.cached.value for part in parts])
    split_known = uncached is not None and cached is not None
    return Usage(
        uncached=_count(uncached),
        cached=_count(cached),
        output=_count(_total([part.output.value for part in parts])),
        reasoning=_count(_total([part.reasoning.value for part in parts])),
        written=_count(_total([part.written.value for part in parts])),
        prompt_total=UNKNOWN if split_known else _count(_total([part.prompt for part in parts])),
    )


def _total(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
