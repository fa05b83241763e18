"""The windows in which dropped messages are searched: pieces of their texts, cut at line ends if possible."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE: Final = 500
"""Characters of one window."""


def windows(text: str, size: int = SIZE) -> Iterator[tuple[int, int]]:
    """Where the windows of a text begin and end, in characters, in order; together they cover it.

    A window has at most `size` characters. It ends behind a line, else behind a space, else anywhere.
    """
    start, length = 0, len(text)
    while start < length:
        stop = min(start + size, length)
        if stop < length:
            least = start + size // 2
            cut = text.rfind("\n", least, stop)
            if cut < 0:
                cut = text.rfind(" ", least, stop)
            if cut >= 0:
                stop = cut + 1
        if not text[start:stop].isspace():
            yield start, stop
        start = stop
