"""What kind of text a tool returned, and which of its lines carry its structure.

Kinds are told by how many lines have a form, over the first lines only; every pattern is anchored and
bounded. What nothing fits is plain text.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

SAMPLED: Final = 400  # lines that are looked at to tell the kind
LOOKED_AT: Final = 300  # characters of a line


class Kind(StrEnum):
    """What a text is."""

    JSON = "json"
    DIFF = "diff"
    LOG = "log"
    TABLE = "table"
    CODE = "code"
    TEXT = "text"


_HUNK: Final = re.compile(r"@@ -\d{1,9}(?:,\d{1,9})? \+\d{1,9}(?:,\d{1,9})? @@")
_DIFF_HEAD: Final = re.compile(
    r"(?:diff --git |--- |\+\+\+ |index [0-9a-f]{6,40}\.\.|@@ |rename |new file mode|deleted file)"
)
_STAMP: Final = re.compile(
    r"\s{0,4}[\[(<]?(?:\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d|\d\d:\d\d:\d\d\b"
    r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d"
    r"|(?:TRACE|DEBUG|INFO|NOTICE|WARN(?:ING)?|ERROR|FATAL|CRITICAL)\b)"
)
_NUMBERED: Final = re.compile(
    r"\s{0,8}\d{1,7}[:\t|]\s?|\s{1,8}\d{1,7}\s{1,3}"
)  # as `cat -n` and editors print
_SIGNATURE: Final = re.compile(
    r"\s{0,16}(?:export\s{1,4}|default\s{1,4}|declare\s{1,4}|public\s{1,4}|private\s{1,4}|protected\s{1,4}"
    r"|internal\s{1,4}|static\s{1,4}|abstract\s{1,4}|final\s{1,4}|async\s{1,4}|pub(?:\([a-z]{1,10}\))?\s{1,4}"
    r"|unsafe\s{1,4}|override\s{1,4}|readonly\s{1,4}){0,5}"
    r"(?:class|interface|enum|struct|trait|impl|type|namespace|module|mod|def|fn|func|function\*?|union|record"
    r"|typedef|template|macro_rules!|object|protocol|extension)\b[ \t(<]"
    r"|\s{0,8}(?:get |set |constructor\()"
    r"|\s{0,8}(?:(?:public|private|protected|static|async|readonly)\s{1,4}){1,4}[\w$<>,\[\] ]{1,80}\("
    r"|(?:export\s{1,4})?(?:const|let|var)\s{1,4}[\w$]{1,60}\s?(?::[^=]{1,80})?=\s?(?:async\s?)?\("
    r"|[A-Za-z_][\w:<>,*& ]{0,80}\s\*{0,2}[\w:~]{1,60}\([^;]{0,160}\)\s?(?:const\s?)?\{?$"
    r"|@[A-Za-z_]\w{0,40}|\#{1,4} \S"
)
_STATEMENT: Final = re.compile(
    r"\s{0,60}(?:import |from \w[\w.]{0,60} import |#include|use |package |return\b"
    r"|if\s?\(|else\b|for\s?\(|while\s?\("
    r"|const |let |var |this\.|self\.|\}|\)|//|/\*|\*/|\"\"\"|@\w)|.{0,290}[{};]\s{0,4}$"
    r"|\s{0,60}(?:if|for|while|elif|with|try|except)\b.{0,200}:\s{0,4}$|\s{0,60}[\w.\[\]\"']{1,60} [+*|-]?= "
)
_RULE: Final = re.compile(r"\s{0,8}[|+]?[\s:|+=-]{3,290}[|+]?\s{0,8}$")
_LEAST_LINES: Final = 4


def kind_of(text: str, lines: Sequence[str]) -> Kind:
    """The kind of a text. `JSON` says that it looks like a JSON object or array, not that it is one."""
    if text[:1].isspace() or text[:1] in ("{", "["):
        bare = text.strip()
        if (bare[:1], bare[-1:]) in (("{", "}"), ("[", "]")):
            return Kind.JSON
    sample = [line[:LOOKED_AT] for line in lines[:SAMPLED] if line.strip()]
    if len(sample) < _LEAST_LINES:
        return Kind.TEXT
    if _is_diff(sample):
        return Kind.DIFF
    if sum(_STAMP.match(line) is not None for line in sample) * 2 >= len(sample):
        return Kind.LOG
    if _is_table(sample):
        return Kind.TABLE
    return Kind.CODE if _is_code(sample) else Kind.TEXT


def structural(kind: Kind, lines: Sequence[str]) -> list[int]:
    """The lines that carry the structure of a text of this kind, those that matter most first."""
    if kind is Kind.CODE:
        found = [at for at, line in enumerate(lines) if is_signature(line)]
        return sorted(found, key=lambda at: (_indent(lines[at]), at))
    if kind is Kind.DIFF:
        heads = [at for at, line in enumerate(lines) if is_diff_head(line)]
        heads.sort(key=lambda at: (not lines[at].startswith("+++ "), at))  # the names of the files first
        known = set(heads)
        changes = [at for at, line in enumerate(lines) if line[:1] in ("+", "-") and at not in known]
        return heads + changes
    if kind is Kind.TABLE:
        return list(range(min(2, len(lines))))
    return []


def is_signature(line: str) -> bool:
    """Whether a line of code opens a declaration; a line number before it does not count."""
    return _SIGNATURE.match(unnumbered(line[:LOOKED_AT])) is not None


def is_diff_head(line: str) -> bool:
    """Whether a line of a diff names a file or opens a hunk."""
    return _DIFF_HEAD.match(line) is not None


def unnumbered(line: str) -> str:
    """A line without the line number that a viewer put before it."""
    found = _NUMBERED.match(line)
    return line[found.end() :] if found else line


def _is_diff(sample: Sequence[str]) -> bool:
    hunks = any(map(_HUNK.match, sample))
    named = any(line.startswith(("diff --git ", "--- ")) for line in sample)
    return hunks and (
        named or sum(line[:1] in ("+", "-", " ", "@") for line in sample) * 5 >= 4 * len(sample)
    )


def _is_code(sample: Sequence[str]) -> bool:
    """Whether half of the lines are statements, or a third of them and a declaration is among them."""
    bare = [unnumbered(line) for line in sample]
    code = sum(_STATEMENT.match(line) is not None for line in bare)
    return code * 2 >= len(bare) or (code * 3 >= len(bare) and any(map(_SIGNATURE.match, bare)))


def _is_table(sample: Sequence[str]) -> bool:
    """Whether nearly all lines have the same number, at least two, of one separator."""
    rows = [line for line in sample if not _RULE.match(line)]
    for separator in ("\t", "|", ",", ";"):
        counts = [row.count(separator) for row in rows]
        usual = (
            max(set(counts), key=lambda count: (counts.count(count), count)) if len(set(counts)) < 9 else 0
        )
        if usual >= 2 and counts.count(usual) * 10 >= 9 * len(rows):
            return True
    return False


def _indent(line: str) -> int:
    """Columns before the first word, by steps of two, so that members of one class come together."""
    bare = unnumbered(line)
    blank = bare[: len(bare) - len(bare.lstrip())]
    return len(blank.expandtabs(4)) // 2
