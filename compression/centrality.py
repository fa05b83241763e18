"""Which of many sentences say most of what all of them say, without repeating each other.

Words are weighed by how rare they are (TF-IDF), a sentence by its likeness to the whole, and each next
choice by what it adds to those before it (maximal marginal relevance). Only integers are used: the order
is the same on every machine.
"""

from __future__ import annotations

import re
from collections import Counter
from math import isqrt
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MOST_CANDIDATES: Final = 300
"""Sentences that are compared with each other; the rest is told apart by its likeness to the whole."""

_WORD: Final = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]|[^\W_]{2,40}+")
_ONE: Final = 1 << 16  # the length of a vector
_NEW, _LIKE = 3, 7  # what repetition takes away, against what likeness to the whole gives

Vector = dict[str, int]


def words(text: str) -> list[str]:
    """The words of a text in lower case; Chinese, Japanese and Korean text by characters."""
    return _WORD.findall(text.lower())


def ranked(texts: Sequence[str], limit: int) -> list[int]:
    """The indexes of at most `limit` texts, in the order in which they should be chosen."""
    vectors = _vectors(texts)
    whole: Counter[str] = Counter()
    for vector in vectors:
        whole.update(vector)
    size = max(isqrt(sum(weight * weight for weight in whole.values())), 1)
    scores = [_product(vector, whole) // size for vector in vectors]
    order = sorted((at for at, vector in enumerate(vectors) if vector), key=lambda at: (-scores[at], at))
    return _varied(order[:MOST_CANDIDATES], scores, vectors, limit)


def _varied(candidates: list[int], scores: Sequence[int], vectors: Sequence[Vector], limit: int) -> list[int]:
    """Take the candidate that is best when its likeness to those taken is subtracted, again and again."""
    likeness = dict.fromkeys(candidates, 0)
    chosen: list[int] = []
    while likeness and len(chosen) < limit:
        best = max(likeness, key=lambda at: (_LIKE * scores[at] - _NEW * likeness[at], -at))
        chosen.append(best)
        del likeness[best]
        for at, known in likeness.items():
            likeness[at] = max(known, _product(vectors[at], vectors[best]) // _ONE)
    return chosen


def _vectors(texts: Sequence[str]) -> list[Vector]:
    """For each text its words with weights, scaled to the length `_ONE`."""
    counts = [Counter(words(text)) for text in texts]
    spread: Counter[str] = Counter()
    for count in counts:
        spread.update(count.keys())
    found: list[Vector] = []
    for count in counts:
        weights = {
            word: min(times, 4) * (256 * len(texts) // spread[word]).bit_length()
            for word, times in count.items()
        }
        size = max(isqrt(sum(weight * weight for weight in weights.values())), 1)
        found.append({word: weight * _ONE // size for word, weight in weights.items()})
    return found


def _product(one: Mapping[str, int], other: Mapping[str, int]) -> int:
    return sum(weight * other.get(word, 0) for word, weight in one.items())
