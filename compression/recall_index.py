"""What left a conversation's prompt, made searchable: its windows, their terms, and how well each answers.

Two ways of looking are put together on one scale. *Coverage* is the share of a question, weighed by
rarity, that a window's terms hold (0 to 1): it finds exact strings and nothing said in other words.
*Likeness* is the cosine of two embeddings: it finds what is said in other words and no hash. A question
that names exact strings which are known here is answered by coverage; for the others coverage only helps
likeness along. Ranks alone do not tell these cases apart, which is why they are not what is put together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple
from zlib import crc32

from ctxgate.compression.recall_bm25 import Bm25, best
from ctxgate.compression.recall_terms import asked, is_structured, terms
from ctxgate.compression.recall_windows import windows

if TYPE_CHECKING:
    from collections.abc import Mapping

CANDIDATES: Final = 100
"""Windows of each way of looking that are put together."""

EXACT: Final = 2.0
"""The weight of an exact string of a question; a plain word has 1."""

PART: Final = 0.3
"""The weight of a word or a piece inside an exact string."""

WORDS_HELP: Final = 0.15
"""What full coverage adds to a likeness where a question names no exact string, ..."""

LIKENESS_HELPS: Final = 0.15
"""... and what full likeness adds to a coverage where it names hardly anything else."""

NAMES_NOTHING, NAMES_ALL = 0.3, 0.6
"""The share of exact strings in a question up to which it counts as naming none, and from which as nothing
but them."""

WORDS_ALONE: Final = 0.6
"""What the coverage of a question without exact strings counts where likeness is not known."""

HELD: Final = 0.15
"""What a window gains that holds all the exact strings of a question, however long it is."""

NAMES: Final = 1.6
"""What the coverage of a question of exact strings alone counts. A window of usual length that holds all of
a question once covers it by 0.45; with these, one bound parts right from wrong answers in every case."""

_PER_WINDOW: Final = 150  # bytes, roughly, as CPython keeps them
_PER_POSTING: Final = 18
_PER_TERM: Final = 230


class Window(NamedTuple):
    """A window by its text's id and its place in it, in characters, with a check of what stands there."""

    id: str
    start: int
    stop: int
    check: int


@dataclass(frozen=True, slots=True)
class Looked:
    """What terms say about a question: each window's coverage, and how much of the question is exact.

    `exact` is 0 where the question names no exact string that is known here, else the share that exact
    strings have in the weight of all its known terms.
    """

    coverage: Mapping[int, float]
    exact: float


class RecallIndex:
    """The windows of one conversation, numbered in the order in which they came."""

    def __init__(self) -> None:
        self.windows: list[Window] = []
        self._ids: set[str] = set()
        self._terms = Bm25()
        self._postings = 0

    def __contains__(self, id_: str) -> bool:
        return id_ in self._ids

    @property
    def size(self) -> int:
        """Bytes of memory, roughly."""
        return (
            _PER_WINDOW * len(self.windows) + _PER_POSTING * self._postings + _PER_TERM * self._terms.distinct
        )

    def add(self, id_: str, text: str) -> range:
        """Index a text; the numbers of its windows, none where the id is known already."""
        first = len(self.windows)
        if id_ in self._ids:
            return range(first, first)
        self._ids.add(id_)
        for start, stop in windows(text):
            piece = text[start:stop]
            found = terms(piece)
            self._postings += len(set(found))
            self._terms.add(found)
            self.windows.append(Window(id_, start, stop, check_of(piece)))
        return range(first, len(self.windows))

    def look(self, question: str) -> Looked:
        """The coverage of a question by each window that has part in it."""
        found = asked(question)
        weights = dict.fromkeys(found.parts, PART)
        weights.update(dict.fromkeys(found.words, 1.0))
        weights.update(dict.fromkeys(found.exact, EXACT))
        rarity = self._terms.rarity
        full = {term: weight * rarity(term) for term, weight in weights.items()}
        known = sum(full.values())
        if not known:
            return Looked({}, 0.0)
        named = sum(full[term] for term in found.exact) + sum(full[term] for term in found.parts)
        if not any(full[term] for term in (*found.exact, *filter(is_structured, found.parts))):
            named = 0.0
        exact = named / known
        # A term that stands in no window was asked for too, and weighs as the rarest known one; but a word
        # beside an exact string that is found says little.
        rarest = max(rarity(term) for term in weights)
        missing = sum(weights[term] * rarest for term in found.exact if not full[term])
        missing += (1 - exact) * sum(weights[term] * rarest for term in found.words if not full[term])
        scores = self._terms.scores(weights)
        whole = sum(full[term] for term in found.exact)
        for term in found.exact if exact >= NAMES_NOTHING else ():
            for number in self._terms.holding(term):
                scores[number] += (known + missing) * HELD * full[term] / whole
        coverage = {number: scores[number] / (known + missing) for number in best(scores, CANDIDATES)}
        return Looked(coverage, exact)


def combined(looked: Looked, likeness: Mapping[int, float] | None) -> dict[int, float]:
    """How relevant each window is: from 0, and rarely above 1. `likeness` None: no embeddings are at hand."""
    coverage = looked.coverage
    if likeness is None:
        scale = WORDS_ALONE + (NAMES - WORDS_ALONE) * looked.exact
        return {number: scale * covered for number, covered in coverage.items()}
    floor = min(likeness.values(), default=0.0)
    named = min(max(looked.exact - NAMES_NOTHING, 0.0) / (NAMES_ALL - NAMES_NOTHING), 1.0)
    of_coverage = WORDS_HELP + (NAMES - WORDS_HELP) * named
    of_likeness = 1 - (1 - LIKENESS_HELPS) * named
    return {
        number: of_coverage * coverage.get(number, 0.0) + of_likeness * likeness.get(number, floor)
        for number in coverage.keys() | likeness.keys()
    }


def check_of(text: str) -> int:
    """A check of a window's text, so that a place in another text is not taken for it."""
    return crc32(text.encode("utf-8", "surrogatepass"))
