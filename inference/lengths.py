"""How many tokens a message has, from its bytes, before an engine has counted it.

Plain text (ASCII) and the other scripts have very different numbers of bytes per token, so they are counted
apart, and each has a ratio of its own, learned per model from prompts whose usage was measured. Clients
that escape other scripts in JSON (`\\u4e2d`) are counted as if they had not.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from ctxgate.inference.estimate import DEFAULT_BYTES_PER_TOKEN, TokenRatio
from ctxgate.inference.record import Record

if TYPE_CHECKING:
    import msgspec

WIDE_BYTES_PER_TOKEN: Final = 2.5
"""Bytes of UTF-8 per token of text that is not ASCII, while nothing was measured: one character of Chinese
or Cyrillic is about one token in a vocabulary made for English."""

_ASCII: Final = bytes(range(128))
_ESCAPE_BYTES: Final = 6
_ESCAPED_BYTES: Final = 3  # of UTF-8, of most characters that are escaped


class Measure(Record, frozen=True):
    """The size of a text: bytes of ASCII, and bytes of UTF-8 of everything else."""

    plain: int = 0
    wide: int = 0

    def plus(self, other: Measure) -> Measure:
        """Both together."""
        return Measure(self.plain + other.plain, self.wide + other.wide)

    def minus(self, other: Measure) -> Measure:
        """What is left without the other; never negative."""
        return Measure(max(0, self.plain - other.plain), max(0, self.wide - other.wide))


NOTHING: Final = Measure()


def measure(raw: bytes | msgspec.Raw) -> Measure:
    """The size of a JSON text."""
    text = bytes(raw)
    wide = 0 if text.isascii() else len(text.translate(None, _ASCII))
    escapes = text.count(b"\\u")
    return Measure(len(text) - wide - _ESCAPE_BYTES * escapes, wide + _ESCAPED_BYTES * escapes)


class Calibration(Record, frozen=True):
    """Bytes per token of one model, for either kind of text."""

    plain: TokenRatio = TokenRatio(prior=DEFAULT_BYTES_PER_TOKEN)
    wide: TokenRatio = TokenRatio(prior=WIDE_BYTES_PER_TOKEN)

    def tokens(self, size: Measure) -> int:
        """The estimated number of tokens, rounded up."""
        return math.ceil(size.plain / self.plain.bytes_per_token + size.wide / self.wide.bytes_per_token)

    def learned(self, size: Measure, tokens: int) -> Calibration:
        """The calibration after a text that measured `tokens`: the ratio of the kind it mostly is.

        The other kind's part is taken off by its own ratio. A text that is neither mostly says nothing.
        """
        plain = size.plain / self.plain.bytes_per_token
        wide = size.wide / self.wide.bytes_per_token
        if plain >= 4 * wide:
            return Calibration(self.plain.updated(size.plain, round(tokens - wide)), self.wide)
        if wide >= 2 * plain:
            return Calibration(self.plain, self.wide.updated(size.wide, round(tokens - plain)))
        return self
