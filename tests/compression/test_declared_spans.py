"""Which spans a policy declares volatile, and how they share the lines of a note."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ctxgate.compression.declared_spans import (
    LONG_SECTION,
    SECTION,
    Sections,
    Span,
    declared,
    grouped,
    sections,
)
from ctxgate.compression.expressions import Expression
from ctxgate.compression.policy import Level, Policy
from ctxgate.compression.volatile import VolatileKind, find_volatile

ALL = Policy(Level.DECLARED, kinds=frozenset(VolatileKind))
CLOCK = "2026-01-05T09:00:00Z"


def found(text: str, policy: Policy = ALL) -> list[str]:
    return [text[span.start : span.end] for span in declared(text, policy, Sections())]


@given(st.lists(st.sampled_from(["a", "\n", "\n\n", "x" * 3000, f"Now {CLOCK}"]), max_size=12).map("".join))
def test_sections_join_to_the_text_and_end_at_line_ends(text: str) -> None:
    pieces = list(sections(text))
    assert "".join(pieces) == text
    assert all(piece.endswith("\n") for piece in pieces[:-1])
    assert all(len(piece) > SECTION for piece in pieces[:-1])
    assert all("\n\n" not in piece[SECTION : len(piece) - 1].rstrip("\n") for piece in pieces)
    assert all(piece.find("\n", LONG_SECTION) in (-1, len(piece) - 1) for piece in pieces)


@given(
    st.lists(
        st.sampled_from([f"Now {CLOCK}", "pid 4711", "See RFC 9110.", "", "tokens used: 17"]), max_size=8
    )
)
def test_the_spans_are_those_of_the_detector(lines: list[str]) -> None:
    text = "\n".join(lines)
    known = Sections()
    expected = [Span(each.start, each.end, each.kind.value) for each in find_volatile(text)]
    for _ in range(2):
        assert declared(text, ALL, known) == expected


def test_a_list_that_is_numbered_over_several_sections_is_no_counter() -> None:
    far = "x" * SECTION
    text = f"Step 1. Read. {far}\n\nStep 2. Write."
    assert len([*sections(text)]) == 2
    assert found("Step 1. Read.") == ["1"]
    assert find_volatile(text) == ()
    assert found(text) == []
    assert found(f"Do it.\n\nStep 2. Write. {far}\n\nStep 2. Write.") == ["2", "2"]
    assert found("Step 1. Read.\n\nrequest #5") == ["1", "5"]


def test_only_kinds_of_the_policy_count() -> None:
    text = f"Now {CLOCK}, pid 4711"
    assert found(text, Policy(Level.DECLARED, kinds=frozenset({VolatileKind.PID}))) == ["4711"]
    assert found(text, Policy(Level.DECLARED)) == []


def test_expressions_reach_over_lines_and_join_what_they_overlap() -> None:
    expressions = (r"<env>[\s\S]*?</env>", r"\b", r"pid (?P<value>\d+)")
    patterns = tuple(map(Expression.compile, expressions))
    policy = Policy(Level.DECLARED, kinds=frozenset({VolatileKind.CLOCK}), patterns=patterns)
    text = f"a <env>\n\nNow {CLOCK}\n</env> pid 12 {CLOCK}"
    assert found(text, policy) == [text[2 : text.index("</env>") + 6], "12", CLOCK]


def lines(text: str, pattern: str) -> list[str]:
    policy = Policy(Level.DECLARED, patterns=(Expression.compile(pattern),))
    return [group.line(text) for group in grouped(text, declared(text, policy, Sections()))]


def test_spans_of_one_line_share_it() -> None:
    assert lines("- at 1 of 2, so 3\n4", r"\d") == ["- at 1 of 2, so 3", "4"]


def test_a_label_is_what_stands_before_on_the_line_and_holds_no_other_span() -> None:
    text = "one\n  two: 1 " + "w" * 70 + " 2"
    assert lines(text, r"\d") == ["two: 1", "w" * 63 + " 2"]


def test_a_span_of_several_lines_is_one() -> None:
    assert lines("a <1\n2> b", r"<[\s\S]*>") == ["a <1\n2>"]
