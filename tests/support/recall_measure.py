"""How well recall answers the questions of `recall_set`: by terms, by embeddings, by ranks, by both together.

    PYTHONPATH=src:tests python -m support.recall_measure [--model FOLDER] [--corpus short]

prints JSON: for each kind of question and each way of looking, the share of questions whose answer is the
first window found, and one of the first five. Embeddings need the extra `dense` and a model.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

from ctxgate.compression.identifiers import found_in
from ctxgate.compression.recall_bm25 import best
from ctxgate.compression.recall_index import RecallIndex, combined
from ctxgate.compression.recall_question import question_of
from ctxgate.compression.recall_text import searchable
from ctxgate.gateway.recall_dense import Embedder, Vectors
from support.recall_set import corpora, identifiers, paraphrases, session

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ctxgate.compression.recall_index import Looked
    from support.recall_set import Question

WAYS: Final = ("terms", "embeddings", "ranks", "together")
_RANK: Final = 60  # of reciprocal-rank fusion
_BATCH: Final = 32
_OF_A_KIND: Final = 100


@dataclass
class Corpus:
    """One indexed corpus, and the text of each window."""

    index: RecallIndex = field(default_factory=RecallIndex)
    texts: list[str] = field(default_factory=list)
    vectors: Vectors = field(default_factory=Vectors)

    def add(self, id_: str, text: str) -> None:
        numbers = self.index.add(id_, text)
        self.texts += [text[each.start : each.stop] for each in self.index.windows[numbers.start :]]

    def embed(self, embedder: Embedder) -> None:
        for at in range(0, len(self.texts), _BATCH):
            texts = self.texts[at : at + _BATCH]
            self.vectors.add(range(at, at + len(texts)), embedder.embedded(texts))


def indexed(names: Sequence[str], embedder: Embedder | None) -> dict[str, Corpus]:
    """The corpora of these names."""
    found: dict[str, Corpus] = {}
    for name, messages in corpora().items():
        if name in names:
            corpus = found[name] = Corpus()
            for at, (_, text) in enumerate(messages):
                corpus.add(str(at), text)
            if embedder is not None:
                corpus.embed(embedder)
    return found


def relevances(
    looked: Looked, likeness: Mapping[int, float] | None
) -> Iterator[tuple[str, Mapping[int, float]]]:
    """Each way of looking, and what it thinks of the windows."""
    yield "terms", combined(looked, None)
    if likeness is None:
        return
    yield "embeddings", likeness
    ranks: dict[int, float] = {}
    for order in (best(looked.coverage, 100), best(likeness, 100)):
        for rank, number in enumerate(order):
            ranks[number] = ranks.get(number, 0.0) + 1 / (_RANK + rank)
    yield "ranks", ranks
    yield "together", combined(looked, likeness)


def answered(question: Question, corpus: Corpus, embedder: Embedder | None) -> dict[str, tuple[bool, ...]]:
    """For each way of looking, whether each of its first five windows answers."""
    looked = corpus.index.look(question.text)
    likeness = None if embedder is None else corpus.vectors.likeness(embedder.embedded([question.text]))
    return {
        way: tuple(question.gold in corpus.texts[number] for number in best(relevance, 5))
        for way, relevance in relevances(looked, likeness)
    }


def measured(names: Sequence[str], model: str | None) -> dict[str, dict[str, Any]]:
    """The table: kind of question, way of looking, recall at 1 and at 5."""
    embedder = None if model is None else Embedder(model)
    found = indexed(names, embedder)
    table: dict[str, dict[str, Any]] = {}
    for kind, questions in (("paraphrases", paraphrases()), ("identifiers", identifiers())):
        asked = [each for each in questions if each.corpus in found]
        hits = [answered(each, found[each.corpus], embedder) for each in asked]
        table[kind] = {"questions": len(asked)}
        for way in WAYS if embedder is not None else WAYS[:1]:
            at_1 = sum(hit[way][:1] == (True,) for hit in hits) / len(asked)
            at_5 = sum(any(hit[way]) for hit in hits) / len(asked)
            table[kind][way] = {"at_1": round(at_1, 3), "at_5": round(at_5, 3)}
    return table


def reachable(stems: Sequence[str]) -> dict[str, tuple[int, float]]:
    """By kind, some exact strings of sessions, and the share found among five windows by asking for them.

    A hundred of each kind are asked for; of those on the border of two windows, the two together count.
    """
    corpus = Corpus()
    strings: dict[str, set[str]] = {}
    for number, said in enumerate(said for stem in stems for said in session(stem)):
        corpus.add(str(number), searchable(said))
        for each in found_in(said):
            strings.setdefault(each.kind.value, set()).add(each.text)
    table: dict[str, tuple[int, float]] = {}
    for kind, every in strings.items():
        texts = sorted(every, key=lambda text: blake2b(text.encode()).digest())[:_OF_A_KIND]
        found = 0
        for text in texts:
            numbers = best(combined(corpus.index.look(question_of(text)), None), 5)
            whole = any(text in corpus.texts[number] for number in numbers)
            found += whole or any(text in "".join(corpus.texts[at : at + 2]) for at in numbers)
        table[kind] = (len(texts), found / len(texts))
    return table


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--corpus", action="append")
    arguments = parser.parse_args()
    sys.stdout.write(
        json.dumps(measured(arguments.corpus or ("coding", "short"), arguments.model), indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
