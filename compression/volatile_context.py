"""What the words before a number or a date say about it. Looks at most 64 characters back on one line."""

from __future__ import annotations

import re
from typing import Final

REACH: Final = 64

_WORDS: Final = re.compile(r"[A-Za-z]+(?:['\u2019][a-z]+)?|[^\sA-Za-z]")
_EXAMPLE: Final = re.compile(
    r"\b(?:e\.g|eg\b|examples?|for instance|such as|formats?|formatted|like|sample|default|iso ?8601"
    r"|rfc ?\d{4})",
    re.IGNORECASE,
)
_LIMIT: Final = re.compile(
    r"\b(?:max(?:imum)?|min(?:imum)?|limit(?:ed)?(?: of| to)?|up to|at most|at least)[ _:]?$", re.IGNORECASE
)


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_REFERENCE: Final = _set(
    "see in from to after before than until per of at most least every each and or by through skip repeat "
    "under with max maximum min minimum first next goto if when for"
)
_NOW: Final = _set("now today today's today\u2019s todays current currently")
_TIME_WORDS: Final = _set("time date datetime timestamp clock ts")
_TIMED: Final = _TIME_WORDS | _set("epoch unix unixtime now at seconds millis milliseconds ms")
_CONNECTORS: Final = (
    _set("is it it's it\u2019s the date time day datetime timestamp and utc gmt local system server")
    | _set("here for you in clock iso unix epoch seconds of a")
    | frozenset("=:>\"'`*_(),-/[]{}|")
)
_MARKUP: Final = frozenset("<>\"'`*_-([{#|.")
_OWNERS: Final = frozenset(
    {"system", "local", "server", "session", "request", "wall", "user", "user's", "the", "utc", "env"}
)
_SECRET: Final = re.compile(
    r"\b(?:nonce|signature|sig|hash|digest|etag|token|checksum|sha\d{0,3}|cursor|trace|session|request|build)"
    r"(?:[ _-]?(?:id|key))?[\"']?[ ]?(?:[:=]|is)[ ]?[\"'`]?$",
    re.IGNORECASE,
)


def before(text: str, at: int) -> str:
    """The end of the line's text before a place, at most `REACH` characters."""
    start = max(at - REACH, 0)
    return text[text.rfind("\n", start, at) + 1 or start : at]


def is_example(label: str) -> bool:
    """Whether the words announce an example or the description of a form."""
    return bool(_EXAMPLE.search(label))


def is_limit(label: str) -> bool:
    """Whether the words make what follows a bound that is set once."""
    return bool(_LIMIT.search(label))


def names_secret(label: str) -> bool:
    """Whether the words name a value drawn anew each time: a nonce, a signature, a digest."""
    return bool(_SECRET.search(label))


def says_now(label: str) -> bool:
    """Whether the words say that a date or time is the present one: `Today is`, `<current_time>`, `Date:`."""
    words = _WORDS.findall(label.lower())
    for at in range(len(words) - 1, -1, -1):
        if words[at] in _NOW or (words[at] == "of" and words[at - 1 : at] == ["as"]):
            return True
        if words[at] in _TIME_WORDS and _begins(words[:at]) and at < len(words) - 1:
            return True
        if words[at] not in _CONNECTORS:
            return False
    return False


def says_time(label: str) -> bool:
    """Whether the words make a number of ten digits a time: `timestamp=`, `generated at`, `epoch:`."""
    words = [word for word in _WORDS.findall(label.lower())[-4:] if word.isalpha()]
    return bool(words) and (words[-1] in _TIMED or (words[-1] == "is" and not _TIMED.isdisjoint(words)))


def refers(text: str, at: int) -> bool:
    """Whether the word before a numbered word makes it a reference or a bound: `see step 3`, `max step 9`."""
    words = [word for word in _WORDS.findall(before(text, at).lower()) if word[0].isalpha()]
    return bool(words) and words[-1] in _REFERENCE


def _begins(words: list[str]) -> bool:
    """Whether nothing but markup and words like `system` stands before."""
    return all(word in _MARKUP or word in _OWNERS or word == "/" for word in words)
