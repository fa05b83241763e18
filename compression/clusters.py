"""Where a text may be cut: never inside what a reader sees as one character.

A cut falls at a code point, and further at the border of a grapheme cluster as far as a fixed table
tells: combining marks, joiners, variation selectors, skin tones, flags and line ends stay together. The
table is that of Unicode 3.2, which never changes, and the emoji joiners; so a text is cut at the same
place under every version of Python.
"""

from __future__ import annotations

import unicodedata
from typing import Final

_OLD: Final = unicodedata.ucd_3_2_0
_MARKS: Final = frozenset({"Mn", "Mc", "Me"})
_JOINER: Final = "\u200d"
_LONGEST_RUN: Final = 100_000  # flags in a row that are counted; an even number
_FARTHEST: Final = 64  # code points; a longer pile of marks is no character of any language


def cut_before(text: str, at: int) -> int:
    """The last place at or before `at` where `text` may be cut."""
    at = max(0, min(at, len(text)))
    for place in range(at, max(0, at - _FARTHEST), -1):
        if is_border(text, place):
            return place
    return 0 if at <= _FARTHEST else at


def cut_after(text: str, at: int) -> int:
    """The first place at or after `at` where `text` may be cut."""
    at = max(0, min(at, len(text)))
    for place in range(at, min(len(text), at + _FARTHEST)):
        if is_border(text, place):
            return place
    return len(text) if len(text) - at <= _FARTHEST else at


def is_border(text: str, at: int) -> bool:
    """Whether a cut before `text[at]` parts no cluster."""
    if at <= 0 or at >= len(text):
        return True
    left, right = text[at - 1], text[at]
    if left == "\r":
        return right != "\n"
    if right.isascii():
        return left != _JOINER
    if left == _JOINER or _extends(right):
        return False
    return not (_is_flag(left) and _is_flag(right) and _flags_before(text, at) % 2)


def head_of(text: str, size: int) -> str:
    """The longest beginning of at most `size` bytes of UTF-8 that ends at a border."""
    if size <= 0:
        return ""
    if len(text) <= size and len(text.encode()) <= size:
        return text
    at = len(text[:size].encode()[:size].decode("utf-8", "ignore"))
    return text[: cut_before(text, at)]


def tail_of(text: str, size: int) -> str:
    """The longest end of at most `size` bytes of UTF-8 that begins at a border."""
    if size <= 0:
        return ""
    if len(text) <= size and len(text.encode()) <= size:
        return text
    kept = len(text[-size:].encode()[-size:].decode("utf-8", "ignore"))
    return text[cut_after(text, len(text) - kept) :]


def _extends(char: str) -> bool:
    """Whether a character belongs to the one before it."""
    code = ord(char)
    if code == 0x200D or 0x1F3FB <= code <= 0x1F3FF:  # joiner, skin tone
        return True
    if 0xE0020 <= code <= 0xE01EF or 0x1160 <= code <= 0x11FF:  # tags, selectors; vowels of Hangul
        return True
    if code in (0x0E33, 0x0EB3):  # vowels of Thai and Lao that the table calls letters
        return True
    return _OLD.category(char) in _MARKS


def _is_flag(char: str) -> bool:
    return 0x1F1E6 <= ord(char) <= 0x1F1FF


def _flags_before(text: str, at: int) -> int:
    """How many letters of flags stand directly before `at`."""
    count = 0
    while count < at and count < _LONGEST_RUN and _is_flag(text[at - 1 - count]):
        count += 1
    return count
