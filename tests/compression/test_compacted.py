"""Compactions among the ways in which a history changes."""

from __future__ import annotations

import pytest

from ctxgate.compression.compacted import is_compacted


def compacted(before: str, after: str) -> bool:
    """One letter a message; a capital has ten bytes, another one 1."""
    sizes = [[10 if letter.isupper() else 1 for letter in history] for history in (before, after)]
    return is_compacted(before, after, *sizes)


@pytest.mark.parametrize(
    ("before", "after", "answer"),
    [
        ("ABCDEF", "sEF", True),  # a summary in the place of four
        ("ABCDEF", "sEFGH", True),  # and a new exchange
        ("ABCDEF", "sEFGHI", True),  # as many messages as before
        ("ABCDEF", "stEFGHIJK", True),
        ("ABCDEF", "sF", True),
        ("ABCDEF", "EFGHIJ", True),  # dropped without a word
        ("ABCDEF", "aBcDEF", True),  # two blanked where they stand
        ("ABCDEF", "aBcDEFGH", True),
        ("ABCDEF", "aBCDEF", False),  # one is an edit
        ("ABCDEF", "XBYDEF", False),  # of the same size
        ("ABcdEF", "XYCDEF", False),  # longer
        ("ABCDEF", "sABCDEF", False),  # something was put in
        ("ABCDEF", "stBCDEF", False),
        ("ABCDEF", "sGHI", False),  # nothing is kept: another conversation, for all that one can tell
        ("A", "a", False),
        ("A", "", False),
        ("", "A", False),
    ],
)
def test_the_end_is_kept_behind_less(before: str, after: str, answer: bool) -> None:
    assert compacted(before, after) is answer


def test_of_equal_messages_the_last_one_is_the_end() -> None:
    assert compacted("ABcDc", "sDcEc") is False  # what was last may be one that came again
    assert compacted("ABCDc", "sDcE") is True
