"""The usage of one stream, gathered over its chunks.

Snapshots are cumulative: the last one wins and nothing is summed over time. vLLM's running figures
(`continuous_usage_stats`) count one choice each, so those of *different* choices do add up; the closing
chunk without choices counts them all and outranks them. Parsing waits for the end: a chunk costs a
list assignment.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from ctxgate.inference.record import Record
from ctxgate.inference.usage import UNKNOWN, Certainty, Count, Usage, estimated, measured
from ctxgate.inference.usage_parse import ABSENT, INCLUSIVE, ParsedUsage, RawUsage, parse_usage

if TYPE_CHECKING:
    from collections.abc import Iterable

_NULL: Final = (b"", b"null")
_KEPT: Final = 3  # the first snapshot, the last, and one before it in case the last is garbage


class UsageDialect(Record, frozen=True):
    """How an upstream's usage is to be read for one call.

    `choices` is how many choices the call asked for over all of its `prompts`: n times their number.
    The others are `parse_usage`'s.
    """

    convention: str = INCLUSIVE
    cached_absent_is_zero: bool = False
    choices: int = 1
    prompts: int = 1
    window: int | None = None

    def parse(self, raw: RawUsage) -> ParsedUsage:
        """Read one usage object by this dialect."""
        return parse_usage(
            raw,
            self.convention,
            cached_absent_is_zero=self.cached_absent_is_zero,
            choices=self.choices,
            window=self.window,
        )


@dataclass(slots=True)
class UsageMeter:
    """Collects the usage members of a stream, in order; `result` reads them."""

    dialect: UsageDialect = field(default_factory=UsageDialect)
    _whole: list[RawUsage] = field(default_factory=list)
    _running: dict[int, list[RawUsage]] = field(default_factory=dict)

    def add(self, raw: RawUsage, choice: int | None = None) -> None:
        """Note a chunk's usage member; null and nothing leave the last snapshot standing.

        `choice` is the index of the chunk's only choice; None for a figure over the whole call.
        """
        if raw is None or (isinstance(raw, bytes | msgspec.Raw) and bytes(raw) in _NULL):
            return
        kept = self._whole if choice is None else self._running.setdefault(choice, [])
        if len(kept) == _KEPT:
            kept[1] = kept[2]
            kept[2] = raw
        else:
            kept.append(raw)

    @property
    def closed(self) -> bool:
        """Whether a figure over the whole call has been seen."""
        return bool(self._whole)

    @property
    def last_whole(self) -> RawUsage:
        """The last figure over the whole call as it came; None before there is one."""
        return self._whole[-1] if self._whole else None

    def result(self) -> ParsedUsage:
        """The stream's usage as last reported; `usage` is None when nothing usable was."""
        if len(self._whole) == 1 and not self._running:
            return self.dialect.parse(self._whole[0])
        whole = self._fold(self._whole, self.dialect)
        running = self._fold_running()
        usage = whole.usage or running.usage
        if whole.usage and running.usage:
            usage = merge(running.usage, whole.usage)
        return ParsedUsage(usage, *_notes((running, whole)))

    def _fold(self, raws: Iterable[RawUsage], dialect: UsageDialect) -> ParsedUsage:
        parsed = [dialect.parse(raw) for raw in raws]
        usage: Usage | None = None
        for one in parsed:
            if one.usage is not None:
                usage = one.usage if usage is None else merge(usage, one.usage)
        return ParsedUsage(usage, *_notes(parsed))

    def _fold_running(self) -> ParsedUsage:
        # Running figures leave the cached part out until the last one: there, absent is never zero.
        dialect = msgspec.structs.replace(self.dialect, cached_absent_is_zero=False)
        by_choice = {choice: self._fold(raws, dialect) for choice, raws in self._running.items()}
        known = {choice: one.usage for choice, one in by_choice.items() if one.usage is not None}
        if not known:
            return ParsedUsage(None, *_notes(by_choice.values())) if by_choice else ABSENT
        usage = next(iter(known.values())) if self.dialect.choices == 1 else self._over_choices(known)
        return ParsedUsage(usage, *_notes(by_choice.values()))

    def _over_choices(self, known: dict[int, Usage]) -> Usage:
        """Outputs of all choices, prompts counted once each; what was not seen makes it an estimate."""
        per_prompt = max(self.dialect.choices // self.dialect.prompts, 1)
        prompts = {choice // per_prompt: usage.prompt for choice, usage in known.items()}
        outputs = [usage.output.value for usage in known.values()]
        return Usage(
            uncached=UNKNOWN,
            cached=UNKNOWN,
            output=_add(outputs, whole=len(outputs) >= self.dialect.choices),
            prompt_total=_add(list(prompts.values()), whole=len(prompts) >= self.dialect.prompts),
        )


def merge(earlier: Usage, later: Usage) -> Usage:
    """The later snapshot, with the earlier one's figures where the later is silent.

    The prompt's figures go together: a later total without its split keeps the earlier split only if
    that adds up to the same total.
    """
    keeps_output = later.output.value is None
    silent = later.prompt is None and later.cached.value is None
    unsplit = later.cached.value is None and later.prompt is not None and later.prompt == earlier.prompt
    prompt, output = earlier if silent or unsplit else later, earlier if keeps_output else later
    return msgspec.structs.replace(prompt, output=output.output, reasoning=output.reasoning)


def lower_bound(usage: Usage) -> Usage:
    """The same record with a measured output marked as estimated: the stream was cut, more may be due."""
    if usage.output.value is None or usage.output.certainty is not Certainty.MEASURED:
        return usage
    return msgspec.structs.replace(usage, output=estimated(usage.output.value))


def _add(values: list[int | None], *, whole: bool) -> Count:
    known = [value for value in values if value is not None]
    if not known:
        return UNKNOWN
    complete = whole and len(known) == len(values)
    return measured(sum(known)) if complete else estimated(sum(known))


def _notes(parsed: Iterable[ParsedUsage]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    parsed = list(parsed)
    anomalies = dict.fromkeys(note for one in parsed for note in one.anomalies)
    unknown = {name for one in parsed for name in one.unknown_fields}
    return tuple(anomalies), tuple(sorted(unknown)[:8])
