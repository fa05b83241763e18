"""The detector of volatile text: what it finds and what it leaves alone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ctxgate.compression.volatile import VolatileKind, find_volatile, masked
from support.volatile_lines import NEGATIVE, POSITIVE, parsed


@pytest.mark.parametrize(("kind", "marked"), POSITIVE)
def test_what_is_found(kind: str, marked: str) -> None:
    text, values, starts = parsed(marked)
    spans = find_volatile(text)
    assert [(text[span.start : span.end], span.kind.value) for span in spans] == [(v, kind) for v in values]
    assert [span.start for span in spans] == starts


@pytest.mark.parametrize("text", NEGATIVE)
def test_what_is_left_alone(text: str) -> None:
    assert [(text[span.start : span.end], span.kind.value) for span in find_volatile(text)] == []


def test_the_tables_are_large_enough_and_name_every_kind() -> None:
    assert len(POSITIVE) >= 60
    assert len(NEGATIVE) >= 60
    assert {kind for kind, _ in POSITIVE} == {kind.value for kind in VolatileKind}


def test_a_head_with_several_spans() -> None:
    text = (
        "You are a coding agent.\n\nRules:\n- Use Python 3.11.\n\n<env>\nToday's date: 2026-01-05\n"
        "Session: 3f2b8c1e-9d4a-4e6f-8b7c-1a2b3c4d5e6f\nScratch: /tmp/tmpab12\n</env>\n"
        "Current time: 2026-01-05T09:00:00Z"
    )
    spans = find_volatile(text)
    assert [(span.kind.value, span.label) for span in spans] == [
        ("date", "Today's date: "),
        ("uuid", "Session: "),
        ("path", "Scratch: /tmp/"),
        ("clock", "Current time: "),
    ]
    assert masked(text, spans) == (
        "You are a coding agent.\n\nRules:\n- Use Python 3.11.\n\n<env>\nToday's date: [date]\n"
        "Session: [uuid]\nScratch: /tmp/[path]\n</env>\nCurrent time: [clock]"
    )


def test_the_label_is_bounded_and_of_one_line() -> None:
    text = "first line\n" + "x" * 100 + " Current time: 2026-01-05T09:00:00Z"
    (span,) = find_volatile(text)
    assert span.label == text[span.start - 64 : span.start]


@given(
    st.lists(
        st.sampled_from([text for _, text in POSITIVE] + NEGATIVE + ["\n", " ", "0", "a", ":", "«", "-"])
        | st.text(),
        max_size=8,
    ).map("".join)
)
@example("\n\nOn branch x")
def test_spans_are_ordered_disjoint_and_never_empty(text: str) -> None:
    position = 0
    for span in find_volatile(text):
        assert position <= span.start < span.end <= len(text)
        assert text[span.start : span.end].strip()
        assert len(span.label) <= 64
        position = span.end


@given(st.datetimes(), st.sampled_from(["T", " "]), st.sampled_from(["", "Z", "+02:00", " UTC"]))
def test_every_iso_time_of_this_and_the_last_century_is_found(at: Any, joint: str, zone: str) -> None:
    at = at.replace(year=1900 + at.year % 200)
    stamp = at.isoformat(joint) + zone
    text = f"Head.\nCurrent time: {stamp}\nTail."
    assert [text[span.start : span.end] for span in find_volatile(text)] == [stamp]
