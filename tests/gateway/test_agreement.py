"""Agreement of two pools: answers, checks, intervals."""

from __future__ import annotations

import pytest

from ctxgate.gateway.agreement import (
    Answer,
    BadCases,
    Case,
    Outcome,
    Share,
    compare,
    mcnemar,
    passes,
    read_answer,
    read_cases,
    same,
)


@pytest.mark.parametrize(
    ("count", "total", "low", "high"),
    [
        (10, 10, 0.7225, 1.0),
        (0, 10, 0.0, 0.2775),
        (9, 10, 0.5958, 0.9821),
        (50, 100, 0.4038, 0.5962),
        (0, 0, 0, 1),
    ],
)
def test_wilsons_interval(count: int, total: int, low: float, high: float) -> None:
    found = Share(count, total).interval
    assert found == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(
    ("one", "other", "p"),
    [(0, 0, 1.0), (1, 0, 1.0), (0, 5, 0.0625), (0, 6, 0.03125), (3, 3, 1.0), (2, 8, 0.109375)],
)
def test_mcnemars_exact_test(one: int, other: int, p: float) -> None:
    assert mcnemar(one, other) == mcnemar(other, one) == p


def test_answers_are_the_same_but_for_white_space_and_the_spelling_of_arguments() -> None:
    def answer(content: str | None, arguments: str) -> Answer | None:
        call = {"id": "x", "function": {"name": "f", "arguments": arguments}}
        return read_answer({"choices": [{"message": {"content": content, "tool_calls": [call]}}]})

    one, other = answer("a  b\n", '{"x": 1, "y": 2}'), answer(" a b", '{"y":2,"x":1}')
    third = answer("a b", '{"x": 2, "y": 2}')
    assert one is not None
    assert other is not None
    assert third is not None
    assert same(one, other)
    assert not same(one, third)
    assert read_answer({"choices": []}) is None
    assert read_answer({"choices": [{"message": {"content": None}}]}) == Answer("")


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        ({"contains": "Rome"}, "It is Rome.", "It is Paris."),
        ({"equals": "a b"}, " a  b ", "a b c"),
        ({"regex": "^[0-9]+$"}, "42", "42!"),
        ({"json": True}, '{"a": 1}', "{a: 1}"),
        ({"contains": "a", "regex": "b"}, "ab", "a"),
    ],
)
def test_checks(check: dict[str, object], good: str, bad: str) -> None:
    assert passes(Answer(good), check)
    assert not passes(Answer(bad), check)
    assert not passes(None, check)


def test_a_check_of_the_tool_that_was_called() -> None:
    assert passes(Answer("", (("read", "{}"),)), {"tool": "read"})
    assert not passes(Answer("read"), {"tool": "read"})


def test_the_figures() -> None:
    checked, free = Case("c", {}, {"contains": "x"}), Case("f", {}, {})
    found = compare(
        [
            Outcome(checked, Answer("x"), Answer("x")),
            Outcome(checked, Answer("x"), Answer("y")),
            Outcome(checked, Answer("y"), Answer("x")),
            Outcome(checked, Answer("x"), None),
            Outcome(free, Answer("q"), Answer("q")),
        ]
    )
    assert (found.agreement, found.first_passes, found.second_passes) == (
        Share(2, 4),
        Share(3, 4),
        Share(2, 4),
    )
    assert (found.only_first, found.only_second, found.failed, found.p_value) == (2, 1, 1, 1.0)


def test_cases_are_read_and_sent_at_temperature_0() -> None:
    first = '{"id": "one", "model": "m", "stream": true, "messages": [], "expect": "x", "max_tokens": 3}'
    text = first + '\n\n{"messages": []}\n'
    one, other = read_cases(text)
    assert one == Case(
        "one", {"temperature": 0, "seed": 0, "messages": [], "max_tokens": 3}, {"contains": "x"}
    )
    assert (other.name, other.check) == ("line 3", {})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no case"),
        ("x", "line 1 is not JSON"),
        ('{"prompt": "x"}', "line 1 needs messages"),
        ('{"messages": [], "expect": {"has": "x"}}', "line 1: expect is a text, or"),
        ('{"messages": [], "expect": {"contains": 1}}', "expect.contains is a text"),
        ('{"messages": [], "expect": {"regex": "("}}', "no regular expression"),
        ('{"messages": [], "expect": {"json": false}}', "expect.json is true"),
    ],
)
def test_mistakes_name_the_line(text: str, words: str) -> None:
    with pytest.raises(BadCases, match=words.replace("(", "\\(")):
        read_cases(text)
