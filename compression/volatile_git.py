"""Blocks of git output in a text: status, branch and log lines that stand together."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_LINE: Final = re.compile(r"[^\n]*\n?")
_REACH: Final = 256  # characters of a line that are looked at
# A line that is git's for certain, whatever stands around it.
_STRONG: Final = re.compile(
    r"On branch [\w./@-]{1,120}\s*$|HEAD detached (?:at|from) \S|Your branch is (?:up to date|ahead|behind)"
    r"|Changes (?:not staged for commit|to be committed):|Untracked files:\s*$|nothing to commit\b"
    r"|## [\w./-]{1,80}\.\.\.[\w./-]|commit [0-9a-f]{40}\b|no changes added to commit"
)
# A line that is git's beside a strong one or below a heading.
_WEAK: Final = re.compile(
    r"[ \t]{1,8}(?:modified|new file|deleted|renamed|typechange|both modified):[ ]|\s{1,4}\(use \"git "
    r"|(?:\?\?|!!|[MADRCUT ][MADRCUT]|[MADRCUT] ) ?[\w.\"/-]{1,200}(?: -> \S{1,200})?\s*$"
    r"|[0-9a-f]{7,40} \S|[ \t]{1,8}[\w.-]{1,80}/[\w./-]{0,120}\s*$|(?:Author|Date|Merge): {1,3}\S"
    r"|[ \t]{1,8}[\w.-]{1,80}\s*$|and have \d{1,5} and \d{1,5} different|\(clean\)\s*$"
)
_HEADING: Final = re.compile(
    r"[<#*\s]{0,6}(?:git[ _-]?status|gitStatus|recent commits|git log|working tree)\b[^\n]{0,80}[:>]\**\s*$"
    r"|Status:\s*$",
    re.IGNORECASE,
)


def git_blocks(text: str) -> Iterator[tuple[int, int]]:
    """Spans of whole lines, without the last line's end. A heading above a block is constant, not in it."""
    start = end = None
    headed = False
    for line in _LINE.finditer(text):
        shown = text[line.start() : min(line.end(), line.start() + _REACH)]
        if _STRONG.match(shown):
            start = line.start() if start is None else start
            end = line.start() + len(line[0].rstrip())
        elif (start is not None or headed) and _WEAK.match(shown):
            start = line.start() if start is None else start
            end = line.start() + len(line[0].rstrip())
        elif _HEADING.match(shown):
            headed = True
        elif shown.strip():
            if start is not None and end is not None:
                yield start, end
            start = end = None
            headed = False
    if start is not None and end is not None:
        yield start, end
