"""Exact strings are found whole and by their parts; words by their stems."""

from __future__ import annotations

import time

import pytest

from ctxgate.compression.recall_terms import asked, is_structured, terms


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("reads reading read", ["read", "read", "read"]),
        ("class classes process", ["class", "class", "process"]),
        ("userName", ["username", "user", "name"]),
        ("user_name", ["user_name", "user", "name"]),
        ("HTTPServer", ["httpserver", "http", "server"]),
        ("d56a046", ["d56a046", "56", "046"]),
        ("src/core/main.ts", ["src/core/main.ts", "core/main.ts", "main.ts", "src", "core", "main", "ts"]),
        ("../xyz/", ["../xyz", "xyz"]),
        ("$161", ["$161", "161"]),
        ("@app/x.py", ["@app/x.py", "app/x.py", "x.py", "app", "py"]),
        ("#12,", ["#12", "12"]),
        ("HAT-039", ["hat-039", "hat", "039"]),
        ("\u4f60\u597d\u4e16\u754c", ["\u4f60\u597d", "\u597d\u4e16", "\u4e16\u754c"]),
        ("caf\u00e9 \u0410\u0411\u0412", ["caf\u00e9", "\u0430\u0431\u0432"]),
        ("", []),
        ("--- *** \ud83d", []),
    ],
)
def test_terms(text: str, expected: list[str]) -> None:
    assert terms(text) == expected


def test_a_question_is_parted_into_exact_strings_their_parts_and_words() -> None:
    found = asked("What do we know about src/main.ts and the failing payments of order_17?")
    assert found.exact == ("src/main.ts", "order_17")
    assert set(found.parts) == {"main.ts", "src", "main", "ts", "order", "17"}
    assert found.words == ("fail", "payment")


def test_words_that_say_nothing_are_no_part_of_a_question() -> None:
    assert asked("Where did that come up before? Tell me again what was said there.") == ((), (), ())


def test_every_exact_string_of_a_question_is_a_term_of_the_text_that_holds_it() -> None:
    text = (
        'at ./src/a-b.ts:12, see HTTPServer (req_01ABc) in "../lib/" of v1.2.3, $HOME/x or C:\\dir\\file.txt'
    )
    assert set(asked(text).exact) <= set(terms(text))


@pytest.mark.parametrize(
    ("term", "structured"), [("a/b", True), ("a_b", True), ("word", False), ("17", False)]
)
def test_structured_terms(term: str, structured: bool) -> None:
    assert is_structured(term) is structured


@pytest.mark.parametrize(
    "piece", ["a", "/", "a/", ".", "aB", "_", "\u4e00", "a-", "\\", "a@", "1a", "~/", " ./"]
)
def test_terms_take_time_linear_in_the_text(piece: str) -> None:
    def cost(size: int) -> float:
        text = piece * (size // len(piece))
        rounds = []
        for _ in range(3):
            began = time.process_time()
            terms(text)
            rounds.append(time.process_time() - began)
        return min(rounds)

    small = max(cost(4_000), 1e-3)
    assert cost(32_000) < 40 * small
