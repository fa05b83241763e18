"""BM25 over documents that come one after another.

A term weighs by how rare it is, and by how often it stands in a document of that length:

    score(q, d) = sum over terms t of q:  idf(t) * f / (f + k1 (1 - b + b |d| / mean |d|))
    idf(t) = ln(1 + (N - n + 0.5) / (n + 0.5))

with f the times that t stands in d, n the documents that hold t, N all documents.
"""

from __future__ import annotations

from array import array
from collections import Counter
from math import log
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

K1: Final = 1.2
B: Final = 0.75


class Bm25:
    """An index of documents, each named by the order in which it came."""

    def __init__(self) -> None:
        self._postings: dict[str, array[int]] = {}  # document, times, document, times ...
        self._lengths = array("L")
        self._total = 0

    def __len__(self) -> int:
        return len(self._lengths)

    def add(self, terms: Sequence[str]) -> int:
        """Add a document by its terms; returns its number."""
        number = len(self._lengths)
        postings = self._postings
        for term, times in Counter(terms).items():
            found = postings.get(term)
            if found is None:
                found = postings[term] = array("L")
            found.append(number)
            found.append(times)
        self._lengths.append(len(terms))
        self._total += len(terms)
        return number

    @property
    def distinct(self) -> int:
        """The number of different terms."""
        return len(self._postings)

    def rarity(self, term: str) -> float:
        """The term's idf; that of a term that stands in no document is 0."""
        found = self._postings.get(term)
        if found is None:
            return 0.0
        holding, every = len(found) // 2, len(self._lengths)
        return log(1 + (every - holding + 0.5) / (holding + 0.5))

    def holding(self, term: str) -> list[int]:
        """The documents that hold a term."""
        return list(self._postings.get(term, ())[::2])

    def scores(self, weights: Mapping[str, float]) -> dict[int, float]:
        """The score of every document that holds one of the terms, each term's part times its weight."""
        scores: dict[int, float] = {}
        lengths = self._lengths
        if not lengths:
            return scores
        slope = K1 * B * len(lengths) / max(self._total, 1)
        for term, weight in weights.items():
            found = self._postings.get(term)
            if found is None:
                continue
            part = weight * self.rarity(term)
            for at in range(0, len(found), 2):
                number, times = found[at], found[at + 1]
                gain = part * times / (times + K1 * (1 - B) + slope * lengths[number])
                scores[number] = scores.get(number, 0.0) + gain
        return scores


def best(scores: Mapping[int, float], count: int) -> list[int]:
    """The documents of the highest scores, best first; of equal ones the later."""
    return sorted(scores, key=lambda number: (scores[number], number), reverse=True)[:count]
