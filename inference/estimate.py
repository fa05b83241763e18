"""Token counts where the engine reported none, from sizes and a learned ratio.

A ratio is a pure value: bytes per token of one model and one kind of text (prompts as JSON bodies and
output text differ). It learns from calls whose usage was measured. Everything here yields *estimated*
counts; a measured figure is never replaced.
"""

from __future__ import annotations

import math
from statistics import median
from typing import Final

import msgspec

from ctxgate.inference.record import Record
from ctxgate.inference.usage import UNKNOWN, Certainty, Count, Usage, estimated

DEFAULT_BYTES_PER_TOKEN: Final = 4.0  # English prose and code with a 100k-200k vocabulary
_SAMPLES: Final = 15
_LEAST_TOKENS: Final = 16  # shorter texts are dominated by the template's own tokens
_LOWEST, _HIGHEST = 0.25, 64.0  # beyond these a pair is a fault of the report, not a property of the text


class TokenRatio(Record, frozen=True):
    """Bytes per token: the median of the latest samples, so that single outliers do not move it."""

    samples: tuple[float, ...] = ()
    prior: float = DEFAULT_BYTES_PER_TOKEN

    @property
    def bytes_per_token(self) -> float:
        """The ratio in use; the prior until something was measured."""
        return median(self.samples) if self.samples else self.prior

    def updated(self, size: int, tokens: int) -> TokenRatio:
        """The ratio after a call of `size` bytes that measured `tokens`; the same if that says nothing."""
        if tokens < _LEAST_TOKENS or not _LOWEST <= size / tokens <= _HIGHEST:
            return self
        return TokenRatio((*self.samples[1 - _SAMPLES :], size / tokens), self.prior)


def estimate_output_tokens(text_bytes: int, events: int, ratio: TokenRatio) -> Count:
    """Output tokens from the text that came and the number of chunks that carried some.

    A chunk holds at least one token, but often more: engines merge chunks when the reader lags.
    """
    return estimated(max(_tokens(text_bytes, ratio), events))


def estimate_prompt_tokens(body_bytes: int, ratio: TokenRatio) -> Count:
    """Prompt tokens from the size of the request body."""
    return estimated(_tokens(body_bytes, ratio))


def _tokens(size: int, ratio: TokenRatio) -> int:
    return math.ceil(size / ratio.bytes_per_token)


def fill_unknown(
    usage: Usage, *, prompt: int | None = None, cached: int | None = None, output: int | None = None
) -> Usage:
    """The record with its unknown counts estimated; known ones stay as they are.

    A reported prompt total outranks the estimated `prompt`. `cached` is the predicted hit, clipped to
    the prompt; without a prediction the cached part stays unknown and the uncached part is estimated as
    the whole prompt, which prices it from above.
    """
    if output is not None and usage.reasoning.value is not None:
        output = max(output, usage.reasoning.value)  # a part is never larger than its whole
    return msgspec.structs.replace(
        _fill_prompt(usage, prompt, cached), output=_or_estimate(usage.output, output)
    )


def _fill_prompt(usage: Usage, prompt: int | None, cached: int | None) -> Usage:
    if usage.uncached.value is not None and usage.cached.value is not None:
        return usage
    total = prompt if usage.prompt is None else usage.prompt
    if total is None:
        return msgspec.structs.replace(usage, cached=_or_estimate(usage.cached, cached))
    floor = max(usage.uncached.value or 0, usage.written.value or 0)
    hit = cached if usage.cached.value is None else usage.cached.value
    hit = None if hit is None else min(hit, max(total - floor, 0))
    rest = max(total - (hit or 0), usage.written.value or 0)
    return msgspec.structs.replace(
        usage,
        uncached=_or_estimate(usage.uncached, rest),
        cached=usage.cached if usage.cached.value is not None else _or_unknown(hit),
    )


def _or_estimate(count: Count, value: int | None) -> Count:
    if count.certainty is not Certainty.UNKNOWN or value is None:
        return count
    return estimated(value)


def _or_unknown(value: int | None) -> Count:
    return UNKNOWN if value is None else estimated(value)
