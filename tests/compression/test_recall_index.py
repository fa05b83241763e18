"""The ranking: BM25 by hand, windows, coverage, and how the two ways of looking are put together."""

from __future__ import annotations

from math import log

import pytest

from ctxgate.compression.recall_bm25 import Bm25, best
from ctxgate.compression.recall_index import Looked, RecallIndex, check_of, combined
from ctxgate.compression.recall_question import LONGEST, MEANING, meaning_of, question_of
from ctxgate.compression.recall_text import searchable
from ctxgate.compression.recall_windows import windows
from ctxgate.compression.said import Call, Said

# Three documents of 2, 3 and 1 terms: the mean length is 2.
DOCUMENTS = (["a", "b"], ["a", "a", "c"], ["d"])


@pytest.fixture
def bm25() -> Bm25:
    index = Bm25()
    assert [index.add(document) for document in DOCUMENTS] == [0, 1, 2]
    return index


def test_bm25_gives_what_its_formula_gives_by_hand(bm25: Bm25) -> None:
    # a stands in two of three documents: idf = ln(1 + 1.5 / 2.5); b in one: ln(1 + 2.5 / 1.5)
    rare_a, rare_b = log(1.6), log(1 + 2.5 / 1.5)
    scores = bm25.scores({"a": 1.0, "b": 2.0, "unknown": 1.0})
    # |d| = 2: k1 (1 - b + b 2/2) = 1.2; |d| = 3: 1.2 (0.25 + 0.75 * 1.5) = 1.65
    assert scores == pytest.approx({0: rare_a / 2.2 + 2 * rare_b / 2.2, 1: rare_a * 2 / 3.65})
    assert bm25.rarity("unknown") == 0.0
    assert bm25.distinct == 4


def test_the_best_come_first_and_of_equals_the_later() -> None:
    assert best({0: 1.0, 1: 2.0, 2: 2.0, 3: 0.5}, 3) == [2, 1, 0]


def test_an_empty_index_finds_nothing() -> None:
    assert Bm25().scores({"a": 1.0}) == {}
    assert RecallIndex().look("anything at all") == Looked({}, 0.0)


def test_windows_end_at_lines_where_they_can() -> None:
    text = "x" * 70 + "\n" + "y" * 20 + " " + "z" * 150
    assert list(windows(text, 100)) == [(0, 71), (71, 171), (171, 242)]
    assert list(windows("a" * 60 + " " + "b" * 60, 100)) == [(0, 61), (61, 121)]
    assert list(windows("")) == []
    assert list(windows(" \n" * 30, 10)) == []


def test_a_window_knows_where_it_stands() -> None:
    index = RecallIndex()
    text = "first line of it\n" * 60
    assert index.add("one", text) == range(3)
    assert index.add("one", "something else") == range(3, 3)
    assert "one" in index
    assert "".join(text[each.start : each.stop] for each in index.windows) == text
    assert [each.check for each in index.windows] == [
        check_of(text[each.start : each.stop]) for each in index.windows
    ]
    assert index.size > 0


def test_coverage_is_the_weighed_share_of_the_question() -> None:
    index = RecallIndex()
    for at, text in enumerate(("gate/main.py fails", "brown horses here", "still brown")):
        index.add(str(at), text)
    looked = index.look("gate/main.py")
    # Every known term of the question stands in the first window alone, and all of them are of the path.
    assert set(looked.coverage) == {0}
    assert looked.exact == 1.0
    assert 0.3 < looked.coverage[0] < 1.0
    # A word that stands nowhere was asked for too, and weighs as much as the rarest that does.
    half = index.look("brown zebras")
    assert half.exact == 0.0
    alone = index.look("brown")
    assert half.coverage[1] < alone.coverage[1] * 0.6
    # An exact string that is not known makes no question exact.
    assert index.look("other_thing.rs brown").exact == 0.0


def test_a_question_by_names_goes_by_coverage_and_any_other_by_likeness() -> None:
    likeness = {0: 0.8, 1: 0.5}
    named = combined(Looked({0: 0.1, 1: 0.7}, 1.0), likeness)
    assert named == pytest.approx({0: 1.6 * 0.1 + 0.15 * 0.8, 1: 1.6 * 0.7 + 0.15 * 0.5})
    meant = combined(Looked({0: 0.1, 1: 0.7}, 0.0), likeness)
    assert meant == pytest.approx({0: 0.15 * 0.1 + 0.8, 1: 0.15 * 0.7 + 0.5})
    between = combined(Looked({0: 0.4}, 0.45), likeness)  # half way
    assert between[0] == pytest.approx(0.875 * 0.4 + 0.575 * 0.8)


def test_what_is_not_among_the_nearest_is_as_near_as_the_last_of_them() -> None:
    assert combined(Looked({2: 0.4}, 0.0), {0: 0.8, 1: 0.5})[2] == pytest.approx(0.15 * 0.4 + 0.5)


def test_without_embeddings_words_alone_count_less_than_names() -> None:
    looked = {0: 0.5}
    by_name, by_word = (combined(Looked(looked, exact), None)[0] for exact in (1.0, 0.0))
    assert by_name == pytest.approx(0.8)
    assert by_word == pytest.approx(0.3)


def test_calls_are_searched_without_json_escapes() -> None:
    call = Call("id", "bash", '{"command": "grep \\"x\\" a.py", "limit": 3}')
    said = Said(role="assistant", text="Look:", calls=(call, Call("id", "odd", "no json")))
    assert searchable(said) == 'Look:\nbash\ncommand: grep "x" a.py\nlimit: 3\nodd no json'
    assert searchable(Said()) == ""


def test_a_long_message_is_asked_by_its_ends_and_its_errors() -> None:
    assert question_of("short") == "short"
    text = "begin" + "x" * 3_000 + "\nError: file missing\n" + "y" * 3_000 + "end"
    question = question_of(text)
    assert question.startswith("begin")
    assert question.endswith("end")
    assert "\nError: file missing\n" in question
    assert len(question) <= LONGEST + 10
    assert len(meaning_of(text)) == MEANING + 1
