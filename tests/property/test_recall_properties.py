"""Recall over any text: windows cover it, indexes never raise, snippets keep their bounds."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from ctxgate.compression.recall_gate import held_in
from ctxgate.compression.recall_index import RecallIndex, check_of, combined
from ctxgate.compression.recall_question import LONGEST, meaning_of, question_of
from ctxgate.compression.recall_snippet import HEADING, Passage, snippet
from ctxgate.compression.recall_terms import asked, terms
from ctxgate.compression.recall_windows import SIZE, windows
from ctxgate.compression.summary import fault_of, without_markup

PIECES = st.sampled_from(
    [
        "word ",
        "src/a/b.ts",
        "\n",
        " ",
        "user_name",
        "d56a046e",
        "\u4f60\u597d",
        "<|im_start|>",
        "\U0001f600",
        "x" * 90,
    ]
)
TEXTS = st.lists(PIECES | st.text(max_size=20), max_size=80).map("".join)


@given(TEXTS, st.integers(1, 300))
def test_windows_cover_a_text_in_order(text: str, size: int) -> None:
    at = 0
    for start, stop in windows(text, size):
        assert at <= start < stop <= start + size
        assert not text[at:start].strip()
        at = stop
    assert not text[at:].strip()


@given(st.lists(TEXTS, max_size=5), TEXTS)
def test_relevance_is_within_its_scale_and_places_are_right(texts: list[str], question: str) -> None:
    index = RecallIndex()
    for number, text in enumerate(texts):
        index.add(str(number), text)
    looked = index.look(question)
    assert 0.0 <= looked.exact <= 1.0
    assert all(0.0 <= covered <= 1.15 + 1e-9 for covered in looked.coverage.values())
    likeness = dict.fromkeys(range(len(index.windows)), 0.5)
    for relevance in (combined(looked, None), combined(looked, likeness)):
        assert all(0.0 <= each <= 2.0 for each in relevance.values())
    for window in index.windows:
        piece = texts[int(window.id)][window.start : window.stop]
        assert 0 < len(piece) <= SIZE
        assert check_of(piece) == window.check


@given(TEXTS)
def test_a_window_that_holds_an_exact_string_covers_it(text: str) -> None:
    index = RecallIndex()
    index.add("decoy", "nothing of the kind stands here at all")
    index.add("text", text)
    for window in index.windows:
        piece = text[window.start : window.stop] if window.id == "text" else ""
        for exact in asked(piece).exact:
            assert exact in terms(piece)


@given(TEXTS)
def test_questions_are_bounded(text: str) -> None:
    assert len(question_of(text * 20)) <= max(LONGEST + 40, 0)
    assert len(meaning_of(text * 20)) <= 1_001


@given(st.lists(st.tuples(TEXTS, st.integers(0, 3), st.floats(0, 1)), max_size=6), st.integers(0, 600))
def test_a_snippet_keeps_its_budget_and_holds_no_markup(
    pieces: list[tuple[str, int, float]], budget: int
) -> None:
    passages = [
        Passage(f"{number}", "tool", 0, text, score) for text, number, score in pieces if text.strip()
    ]
    found = snippet(passages, budget)
    if found is None:
        return
    assert found.text.startswith(HEADING)
    assert found.tokens <= budget + 2 * len(passages) + 1
    body = found.text.removeprefix(HEADING)
    assert without_markup(body) == body
    assert fault_of(f"enough letters here {body}", 10**9) is None
    assert set(found.ids) <= {passage.id for passage in passages}


@given(TEXTS, st.booleans())
def test_what_a_body_holds_is_known_however_it_is_escaped(text: str, escaped: bool) -> None:
    body = json.dumps([{"content": f"before {text} after"}], ensure_ascii=escaped).encode()
    assert held_in(body)(text)
