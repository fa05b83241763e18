"""How many tokens a message has, from its bytes, before an engine has counted it.

Plain text (ASCII) and the other scripts have very different numbers of bytes per token, so they are counted
apart, and each has a ratio of its own, learned per model from prompts whose usage was measured. Clients
that escape other scripts in JSON (`\\u4e2d`) are counted as if they had not. What is no text, such as a
picture, counts by its kind and not by the bytes that it travels in (`media`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from ctxgate.inference.estimate import DEFAULT_BYTES_PER_TOKEN, TokenRatio
from ctxgate.inference.media import media_in
from ctxgate.inference.record import Record

if TYPE_CHECKING:
    import msgspec

WIDE_BYTES_PER_TOKEN: Final = 2.5
"""Bytes of UTF-8 per token of text that is not ASCII, while nothing was measured: one character of Chinese
or Cyrillic is about one token in a vocabulary made for English."""

_ASCII: Final = bytes(range(128))
_ESCAPE_BYTES: Final = 6
_ESCAPED_BYTES: Final = 3  # of UTF-8, of most characters that are escaped
_MOSTLY_PLAIN: Final = 4  # times the tokens of other scripts
_MOSTLY: Final = 2
_HARDLY_MEDIA: Final = 20  # times their tokens: what an unmeasured picture has may be far from the guess


class Measure(Record, frozen=True):
    """The size of a text: bytes of ASCII, and bytes of UTF-8 of everything else.

    `media` stands for what is no text: the bytes of plain text that would have as many tokens.
    """

    plain: int = 0
    wide: int = 0
    media: int = 0

    def plus(self, other: Measure) -> Measure:
        """Both together."""
        return Measure(self.plain + other.plain, self.wide + other.wide, self.media + other.media)

    def minus(self, other: Measure) -> Measure:
        """What is left without the other; never negative."""
        return Measure(
            max(0, self.plain - other.plain),
            max(0, self.wide - other.wide),
            max(0, self.media - other.media),
        )

    def of_media(self) -> Measure:
        """What is no text of it."""
        return Measure(media=self.media)


NOTHING: Final = Measure()


def measure(raw: bytes | msgspec.Raw) -> Measure:
    """The size of a JSON text; of a message, what is no text counts by its kind."""
    text = bytes(raw)
    size = _of_text(text)
    for medium in media_in(text):
        without = size.minus(_of_text(medium.raw))
        size = without.plus(Measure(media=round(medium.tokens * DEFAULT_BYTES_PER_TOKEN)))
    return size


def _of_text(text: bytes) -> Measure:
    wide = 0 if text.isascii() else len(text.translate(None, _ASCII))
    escapes = text.count(b"\\u")
    return Measure(len(text) - wide - _ESCAPE_BYTES * escapes, wide + _ESCAPED_BYTES * escapes)


class Calibration(Record, frozen=True):
    """Bytes per token of one model, for each kind of text and for what is none."""

    plain: TokenRatio = TokenRatio(prior=DEFAULT_BYTES_PER_TOKEN)
    wide: TokenRatio = TokenRatio(prior=WIDE_BYTES_PER_TOKEN)
    media: TokenRatio = TokenRatio(prior=DEFAULT_BYTES_PER_TOKEN)

    def tokens(self, size: Measure) -> int:
        """The estimated number of tokens, rounded up."""
        return math.ceil(sum(self._parts(size)))

    def learned(self, size: Measure, tokens: int) -> Calibration:
        """The calibration after a text that measured `tokens`: the ratio of the kind it mostly is.

        The other kinds' parts are taken off by their own ratios. A text that is none mostly says nothing.
        """
        plain, wide, media = self._parts(size)
        if plain >= _MOSTLY_PLAIN * wide + _HARDLY_MEDIA * media:
            ratio = self.plain.updated(size.plain, round(tokens - wide - media))
            return Calibration(ratio, self.wide, self.media)
        if wide >= _MOSTLY * plain + _HARDLY_MEDIA * media:
            ratio = self.wide.updated(size.wide, round(tokens - plain - media))
            return Calibration(self.plain, ratio, self.media)
        if media >= _MOSTLY * (plain + wide):
            ratio = self.media.updated(size.media, round(tokens - plain - wide))
            return Calibration(self.plain, self.wide, ratio)
        return self

    def _parts(self, size: Measure) -> tuple[float, float, float]:
        """Tokens of each kind."""
        return (
            size.plain / self.plain.bytes_per_token,
            size.wide / self.wide.bytes_per_token,
            size.media / self.media.bytes_per_token,
        )
