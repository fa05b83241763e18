"""Which writing system most letters of a text belong to."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from typing import Final

LEAST_LETTERS: Final = 40
"""A text with fewer letters says nothing about its language."""

LOOKED_AT: Final = 20_000
"""Characters of a text, taken from its beginning."""

# First code points of the ranges in which letters of one script follow each other, in order.
_RANGES: Final = (
    (0x0041, "latin"),
    (0x0370, "greek"),
    (0x0400, "cyrillic"),
    (0x0530, "armenian"),
    (0x0590, "hebrew"),
    (0x0600, "arabic"),
    (0x0900, "indic"),
    (0x0E00, "thai"),
    (0x0E80, "other"),
    (0x1100, "hangul"),
    (0x1200, "other"),
    (0x1E00, "latin"),
    (0x1F00, "greek"),
    (0x2000, "other"),
    (0x3040, "kana"),
    (0x3100, "other"),
    (0x3400, "han"),
    (0xA000, "other"),
    (0xAC00, "hangul"),
    (0xD7B0, "other"),
    (0xF900, "han"),
    (0xFB00, "other"),
)
_STARTS: Final = tuple(start for start, _ in _RANGES)


def script_of(text: str) -> str | None:
    """The script of most letters; None where there are fewer than `LEAST_LETTERS`.

    Japanese mixes two scripts: any noticeable part of kana makes a text Japanese ("kana").
    """
    letters = Counter(
        _RANGES[max(bisect_right(_STARTS, ord(each)) - 1, 0)][1]
        for each in text[:LOOKED_AT]
        if each.isalpha()
    )
    total = sum(letters.values())
    if total < LEAST_LETTERS:
        return None
    if 10 * letters["kana"] >= total:
        return "kana"
    return max(letters, key=lambda name: (letters[name], name))
