"""The forms of exact strings: paths, URLs, numbers with units, ids.

Rules for every pattern here: every repetition is bounded or possessive, a boundary on the left keeps a
long run from being tried at each of its characters, and no repetition stands inside another one that can
match the same text. What a pattern finds is checked by plain code where a pattern would need to look back.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

LONGEST: Final = 300  # characters of one identifier

_URL: Final = re.compile(
    r"(?<![A-Za-z0-9])(?:https?|wss?|ftp|ssh|git|file)://[^\s<>\"'`\\|{}\[\]^\x00-\x1f]{2,300}+"
)
_RUN: Final = re.compile(
    r"(?<![\w@.~+/:\\-])[\w@.~+-]{0,120}+(?:[/\\]{1,2}[\w@.+$-]{1,120}+){1,30}+/?"
    r"|(?<![\w@.~+/:\\-])[A-Za-z]:\\{1,2}[\w.\\ -]{1,200}"
)
_FILE: Final = re.compile(
    r"(?<![\w@.~+/\\-])[A-Za-z_][\w-]{0,80}+(?:\.[\w-]{1,40}+){0,4}?"
    r"\.(?:py|pyi|js|jsx|mjs|cjs|ts|tsx|rs|go|java|kt|c|cc|cpp|h|hpp|cs|rb|php|swift|scala|sh|bash|sql|html|css|scss"
    r"|json|jsonl|ya?ml|toml|ini|cfg|conf|lock|md|rst|txt|csv|tsv|xml|log|env|proto|ipynb|tf|vue|svelte|zig|lua|db)"
    r"(?![\w.-]?\w|[(\[])"  # a call such as `console.log(` is no file
)
_UNIT: Final = (
    r"(?:[nmu\u00b5]?s|secs?|seconds?|mins?|minutes?|h|hrs?|hours?|days?|weeks?|months?|years?|[KMGTP]i?B|kB|bytes?"
    r"|bits?|[kKMG]?bps|[kMG]?Hz|px|pt|em|rem|ms|tokens?|lines?|files?|tests?|rows?|items?|requests?|errors?"
    r"|warnings?|failures?|failed|passed|commits?|calls?|messages?|times|chars?|characters|words?|km|kg|cm|mm|m|g|mi"
    r"|miles|USD|EUR|GBP|dollars?|euros?|cents?|passengers?|bags?|seats?|%|\u00b0[CF]|x)"
)
_FIGURE: Final = r"\d{1,15}+(?:[,_]\d{3}){0,5}(?:\.\d{1,9}+)?"
_NUMBER: Final = re.compile(
    rf"(?<![\w.,$\u20ac\u00a3/:-])(?:{_FIGURE} ?{_UNIT}(?![\w-])|[$\u20ac\u00a3] ?{_FIGURE}(?:[kKMB]\b)?)"
    rf"|(?<![\w.,/:-])[$\u20ac\u00a3] ?{_FIGURE}"
)
_UUID: Final = r"[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}"
_ID: Final = re.compile(
    rf"(?<![\w.-])(?:{_UUID}"
    r"|[0-9a-f]{7,128}+|[0-9A-F]{7,128}+"  # hashes
    r"|[A-Za-z][A-Za-z]{1,40}+(?:[_-][A-Za-z]{1,40}+){0,4}[_-]\d{3,20}+"  # user_name_1234, order-1001
    r"|[A-Z]{2,5}\d{2,8}+|[A-Z]{2,12}-\d{1,8}+"  # HAT039, JIRA-12
    r"|(?=[A-Z]{0,8}\d)(?=\d{0,8}[A-Z])[A-Z0-9]{6,10}+"  # booking codes
    r"|[a-z]{2,12}_(?=[A-Za-z0-9]{0,40}\d)[A-Za-z0-9]{8,64}+"  # req_01ABc...
    r")(?![\w-])|(?<![\w&#])#\d{1,8}+(?!\w)|(?<![\w.@])[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,4}"
)
_TRAILING: Final = ".,;:!?)]}'\"*_"
_EXTENSION: Final = re.compile(r"\.[A-Za-z][\w]{0,9}$")
_HAS_LETTER: Final = re.compile(r"[A-Za-z]{2}")
_MIME: Final = re.compile(r"(?:application|text|image|audio|video|font|multipart)/[\w.+-]+$")
_ESCAPES: Final = re.compile(r"\\[nrtbsdw]$|\\[nrt][A-Za-z]?")


def urls(text: str) -> Iterator[str]:
    """URLs without the punctuation of the sentence around them."""
    for found in _URL.finditer(text):
        yield found.group().rstrip(_TRAILING)


def paths(text: str) -> Iterator[str]:
    """File paths: with a directory, or a bare name with a known extension."""
    for found in _RUN.finditer(text):
        path = found.group().rstrip(".,:;!?+-")
        if text[found.end() : found.end() + 3] == "://" or text[found.start() - 1 : found.start()] == ":":
            continue
        if _is_path(path):
            yield path
    for found in _FILE.finditer(text):
        yield found.group()


def numbers(text: str) -> Iterator[str]:
    """Numbers with a unit or a currency."""
    for found in _NUMBER.finditer(text):
        yield found.group()


def ids(text: str) -> Iterator[str]:
    """UUIDs, hashes, e-mail addresses, codes and names that end with a number."""
    for found in _ID.finditer(text):
        value = found.group()
        if value.isdigit() or (value.isalpha() and value.isascii()):
            continue
        yield value


def _is_path(path: str) -> bool:
    """Whether a run with slashes is a path: not `and/or`, a date, a fraction, or a media type."""
    if len(path) > LONGEST or len(path) < 3 or not _HAS_LETTER.search(path) or _MIME.match(path):
        return False
    if "\\" in path:
        return ":" in path[:2] or (_EXTENSION.search(path) is not None and not _ESCAPES.search(path))
    parts = path.strip("/").split("/")
    if _EXTENSION.search(parts[-1]):
        return True
    if path.startswith(("/", "~/", "./", "../", "@")):
        return len(parts) >= 2
    return len(parts) >= 3
