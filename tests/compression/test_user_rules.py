"""Orders of users, word for word, with what they depend on."""

from __future__ import annotations

import pytest

from ctxgate.compression.user_rules import LONGEST, user_rules


@pytest.mark.parametrize(
    "rule",
    [
        "Never commit to main.",
        "always run the linter first",
        "You must not touch the database.",
        "do not rename files",
        "Don\u2019t add dependencies",
        "Make sure the tests pass.",
        "From now on: answer in German (short).",
        "I only want e2e tests, anything else is noise.",
        "I don't want you to touch it",
        "<rule>Never push</rule>",
        "return only JSON",
        "never use eval;",
        "can you never do that again?",
        "1: always number them",
        "> never quote me",
    ],
)
def test_context_e2_orders_are_kept_word_for_word(rule: str) -> None:
    assert user_rules(f"Hello there.\n{rule}\nThe build is red.") == [rule]


@pytest.mark.parametrize(
    "text",
    [
        "The build is red.",
        "why does it fail?",
        "I don't remember the id.",
        "I need to change my flight.",
        "const never = always(1);",
        "    at never.always (/x/y.js:1:2)",
        '{"must": "never"}',
        "```\nnever in a fence\n```",
        "TypeError: must be str",
        "$ make never",
        "",
    ],
)
def test_what_orders_nothing_is_no_rule(text: str) -> None:
    assert user_rules(text) == []


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        (
            "Deploy only at night. Unless the build is red, then wait. Thanks.",
            ["Deploy only at night. Unless the build is red, then wait."],
        ),
        (
            "The CI deploys main. So never push there. Fine.",
            ["The CI deploys main. So never push there."],
        ),
        (
            "When you edit tests:\n- never touch fixtures\n- keep the names\n\nOther text.",
            ["When you edit tests: - never touch fixtures"],
        ),
        ("Rules:\n- use tabs\n- run pytest\nBye.", ["Rules: - use tabs", "Rules: - run pytest"]),
        ("Never a.  Never b.", ["Never a.", "Never b."]),
        ("Never a.\nNever a.", ["Never a."]),
    ],
)
def test_context_e3_an_order_keeps_its_condition(text: str, rules: list[str]) -> None:
    assert user_rules(text) == rules


def test_a_rule_in_a_sea_of_words_is_cut_around_its_order() -> None:
    [rule] = user_rules("word " * 3000 + "never do this " + "word " * 3000)
    assert len(rule) <= LONGEST
    assert "word never do this word" in rule
    assert set(rule.split()) == {"word", "never", "do", "this"}
