"""Blocks of git output in a text: status, branch and log lines that stand together."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_REACH: Final = 256  # characters of a line that are looked at
# A line that is git's for certain, whatever stands around it.
_STRONG: Final = re.compile(
    r"On branch [\w./@-]{1,120}\s*$|HEAD detached (?:at|from) \S|Your branch is (?:up to date|ahead|behind)"
    r"|Changes (?:not staged for commit|to be committed):|Untracked files:\s*$|nothing to commit\b"
    r"|## [\w./-]{1,80}\.\.\.[\w./-]|commit [0-9a-f]{40}\b|no changes added to commit"
)
# A line that is git's below a heading or a strong line.
_FORM: Final = re.compile(
    r"[ \t]{1,8}(?:modified|new file|deleted|renamed|typechange|both modified):[ ]"
    r"|(?:\?\?|!!|[MADRCUT ][MADRCUT]|[MADRCUT]) {1,2}[\w.\"/-]{1,200}(?: -> \S{1,200})?\s*$"
    r"|[0-9a-f]{7,40} \S|\(clean\)\s*$"
)
# A line that only a block explains.
_INNER: Final = re.compile(
    r"\s{1,4}\(use \"git |(?:Author|Date|Merge): {1,3}\S|[ \t]{1,8}[\w./-]{1,120}\s*$|[ ]{4}\S|and have \d"
)
_HEADING: Final = re.compile(
    r"[<#*\s]{0,6}(?:git[ _-]?status|gitStatus|recent commits|git log|working tree)\b[^\n]{0,80}[:>]\**\s*$"
    r"|Status:\s*$",
    re.IGNORECASE,
)


def git_blocks(text: str) -> Iterator[tuple[int, int]]:
    """Spans of whole lines, without the last line's end. A heading above a block is constant, not in it."""
    block: tuple[int, int] | None = None
    headed = False
    for start, end in _lines(text):
        line = text[start : min(end, start + _REACH)]
        inside = block is not None and (_FORM.match(line) or _INNER.match(line))
        if inside or _STRONG.match(line) or (headed and _FORM.match(line)):
            block = (start if block is None else block[0], end)
            headed = False
        elif line.strip():
            if block is not None:
                yield block
            block = None
            headed = bool(_HEADING.match(line))
    if block is not None:
        yield block


def _lines(text: str) -> Iterator[tuple[int, int]]:
    position = 0
    while position < len(text):
        end = text.find("\n", position)
        end = len(text) if end < 0 else end
        yield position, end
        position = end + 1
