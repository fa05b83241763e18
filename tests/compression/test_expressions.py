"""Expressions of operators: what they match, what is refused, and that no text makes them take long."""

from __future__ import annotations

import re

import pytest

from ctxgate.compression.expressions import MOST_MATCHES, BadExpression, Expression


def found(pattern: str, text: str) -> list[str]:
    return [text[start:end] for start, end in Expression.compile(pattern).spans(text)]


def test_the_group_value_is_what_is_meant_else_all_of_the_match() -> None:
    assert found(r"^Build: (?P<value>.+)$", "x\nBuild: 12 a\nBuild: \nBuild: 7") == ["12 a", "7"]
    assert found(r"id=(\d+)", "id=5 id=67 id=") == ["id=5", "id=67"]
    assert found(r"seed(?:=(?P<value>\d+))?", "seed seed=5") == ["5"]
    assert found(r"(?i)mood: \w+", "MOOD: calm") == ["MOOD: calm"]
    assert found(r"(?s)<env>.*?</env>", "<env>\n1</env> <env></env>") == ["<env>\n1</env>", "<env></env>"]


def test_places_are_characters_in_every_script() -> None:
    assert [*Expression.compile("b+").spans("\U0001f680e\u0301bb\ud800b")] == [(3, 5), (6, 7)]
    assert found(r"\pL+", "\u0416\u0438 1") == ["\u0416\u0438"]


def test_braces_that_are_no_repetition_are_text() -> None:
    assert found(r"\{,3\}|\\\{1\}|{x}", "{,3} {x} \\{1}") == ["{,3}", "{x}", "\\{1}"]


def test_classes_are_those_of_ascii() -> None:
    assert found(r"\w+|\d+|x\b", "a\u00e9 \u0663 x\u00e9") == ["a", "x"]


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("", "matches the empty text"),
        ("a*", "matches the empty text"),
        ("(?:a|)", "matches the empty text"),
        ("a" * 513, "is longer than 512 characters"),
        ("(", "missing ): ("),
        ("[z-a]", "invalid character class range: z-a"),
        ("(?=a)b", "no look-around"),
        ("(?!a)b", "no look-around"),
        ("(?<=a)b", "no look-around"),
        ("(?<!a)b", "no look-around"),
        (r"(a)\1", "no back-references"),
        ("(?P<x>a)(?P=x)", "no back-references"),
        ("(?>a+)b", "no atomic groups"),
        ("a++b", "no possessive"),
        ("(?x) a b", "no verbose mode"),
        ("(?a)a", "no verbose mode"),
        (r"a\Z", r"the end of the text is `\z`"),
        (r"\u0041", r"`\x{263A}`"),
        ("a{,3}b", "write {0,n}"),
        ("ba{,}", "write {0,n}"),
        ("a{99999999999}", "an n of at most 1000"),
        ("a{2,99999999999}", "an n of at most 1000"),
        ("a{1001}", "at most 1,000 rounds"),
        ("((a{100}){100}){100}", "at most 1,000 rounds"),
        (r"[\x{80}-\x{10FFFF}]{900}", "too large"),
        ("\ud800", "half a surrogate pair"),
    ],
)
def test_what_cannot_be_matched_in_linear_time_is_refused_with_what_to_write(
    pattern: str, problem: str
) -> None:
    with pytest.raises(BadExpression, match=re.escape(problem)):
        Expression.compile(pattern)


def test_no_refusal_names_what_was_not_written() -> None:
    with pytest.raises(BadExpression) as caught:
        Expression.compile("(")
    assert "(?m)" not in str(caught.value)


# Each takes a backtracking engine longer than the universe has: a test of one that does would not end.
@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"(a|a)*b", "a" * 50_000),
        (r"(a|ab)*c", "ab" * 25_000),
        (r"(a?){30}a{30}b", "a" * 50_000),
        (r"(x+x+)+y", "x" * 50_000),
        (r"(?:(?:a*)*)*b", "a" * 50_000),
        (r"(?P<value>(?:\w+\s?)+)!", "word " * 10_000),
    ],
)
def test_no_expression_runs_away(pattern: str, text: str) -> None:
    assert found(pattern, text) == []


def test_matches_that_look_at_all_the_rest_are_few() -> None:
    """Each match of one letter first looks for another letter up to the end."""
    assert len(found(r".*[^A-Z\n]|[A-Z]", "A" * 20_000)) == MOST_MATCHES


def test_an_expression_is_known_by_its_text() -> None:
    one, two = Expression.compile("a+"), Expression.compile("a+")
    assert one == two != Expression.compile("b+")
    assert hash(one) == hash(two)
    assert repr(one) == "Expression(pattern='a+')"
