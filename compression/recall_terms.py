"""The terms by which dropped text is found again: words, and exact strings whole and in parts.

`src/core/agent-session.ts` gives itself, `agent-session.ts`, `agent-session` and the words in it, so that
it is found by any of them; `userName` and `user_name` meet in `user` and `name`.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

LONGEST: Final = 200
"""Characters of one term; a longer run (base64, a minified file) counts by its beginning."""

_IDEOGRAPHS: Final = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_RUN: Final = re.compile(
    rf"[{_IDEOGRAPHS}]++"
    rf"|(?:[$#@\u20ac\u00a3]|(?<![^\s\"'`(<=,])[.~]{{0,2}}/)?[^\W{_IDEOGRAPHS}]++(?:[./:\\@#+~$-]{{1,2}}[^\W{_IDEOGRAPHS}]++){{0,40}}+"
)
_SIGNS: Final = "$#@\u20ac\u00a3"  # they may stand before a run: a price, an issue, a mention
_SEPARATORS: Final = re.compile(r"[./:\\@#+~$-]+")
_SLASHES: Final = re.compile(r"[/\\]+")
_HUMP: Final = re.compile(r"\d+|[A-Z]+(?![a-z])|[A-Z]?[^\W\d_A-Z]+")
_IDEOGRAPH: Final = re.compile(rf"[{_IDEOGRAPHS}]")
_DEEPEST: Final = 12  # parts of a path that begin a term of their own
_STOP_WORDS: Final = """
a about above after again all also am an and any are as at be because been before being below both but by
can could did do does doing done down each else for from get gets getting go goes got had has have having
he her here hers him his how i if in into is it its just know let like look make me more most my no not
now of off ok on one only or other our out over own please said same say see shall she should so some
such tell than thank thanks that the their them then there these they this those through to told too
under until up us use used very want was we well were what when where which while who whom why will with
would yes you your yours come came
"""
_STOP: Final = frozenset(_STOP_WORDS.split())
"""Words of a question that say nothing about what is asked for."""


def terms(text: str) -> list[str]:
    """Every term of a text, as often as it stands there."""
    found: list[str] = []
    for run in _RUN.findall(text):
        if run.islower() and run.isalpha() and run.isascii():
            found.append(_stem(run[:LONGEST]))
        elif _IDEOGRAPH.match(run):
            found += _pairs(run)
        else:
            whole, parts = _structure(run[:LONGEST])
            found.append(whole)
            found += parts
    return found


class Asked(NamedTuple):
    """The terms of a question: exact strings as they stand, the parts of them, and plain words."""

    exact: tuple[str, ...]
    parts: tuple[str, ...]
    words: tuple[str, ...]


def asked(text: str) -> Asked:
    """The terms of a question, each once, without the words that say nothing."""
    exact: dict[str, None] = {}
    inner: dict[str, None] = {}
    words: dict[str, None] = {}
    for run in _RUN.findall(text):
        if _IDEOGRAPH.match(run):
            words.update(dict.fromkeys(_pairs(run)))
            continue
        whole, parts = _structure(run[:LONGEST])
        if _is_exact(run):
            exact[whole] = None
            inner.update(dict.fromkeys(parts))
        elif whole not in _STOP and run.lower() not in _STOP:
            words[whole] = None
            words.update(dict.fromkeys(parts))
    return Asked(tuple(exact), tuple(each for each in inner if each not in exact), tuple(words))


def _pairs(run: str) -> list[str]:
    return [run[at : at + 2] for at in range(max(len(run) - 1, 1))]


def _structure(run: str) -> tuple[str, list[str]]:
    """A run as a term, and the terms inside it: what follows each slash, the pieces, and the words."""
    whole = run.lower()
    if whole.isalpha():
        words = [word.lower() for word in _HUMP.findall(run)]
        if len(words) < 2:
            return _stem(whole), []
        return whole, [_stem(word) for word in words if len(word) > 1]
    parts: dict[str, None] = {whole.lstrip(_SIGNS): None}
    steps = _SLASHES.split(whole)
    for at in range(1, min(len(steps), _DEEPEST)):
        parts["/".join(steps[at:])] = None
    for piece in _SEPARATORS.split(run):
        parts[_stem(piece.lower())] = None
        for word in _HUMP.findall(piece):
            parts[_stem(word.lower())] = None
    return whole, [part for part in parts if len(part) > 1 and part != whole]


def is_structured(term: str) -> bool:
    """Whether a term is more than a word or a number: pieces that belong together."""
    return not term.isalnum()


def _is_exact(run: str) -> bool:
    """Whether a run is no plain word: a digit, `_` or a separator in it, or a hump."""
    if run.isalpha():
        return run.isascii() and not (run[1:].islower() or run.isupper())
    return len(run) > 2


def _stem(word: str) -> str:
    """A word without the commonest endings of English, so that `reading` meets `reads`."""
    if len(word) < 5 or not word.isalpha():
        return word
    for ending in ("ings", "ing", "edly", "ed", "es", "s", "ly"):
        if word.endswith(ending) and len(word) - len(ending) >= 3 and not word.endswith("ss"):
            return word[: -len(ending)]
    return word[:-1] if word.endswith("e") else word
