"""Lengths in tokens from bytes, for texts in any script."""

from __future__ import annotations

import json

from ctxgate.inference.lengths import Calibration, Measure, measure


def test_scripts_are_counted_apart_however_they_are_spelled() -> None:
    """Three bytes of UTF-8 per Chinese character, also where a client escapes them."""
    document = {"content": "ab\u4e2d\u6587"}
    plain = len('{"content": "ab"}')
    assert measure(json.dumps(document, ensure_ascii=False).encode()) == Measure(plain, 6)
    assert measure(json.dumps(document).encode()) == Measure(plain, 6)
    assert measure(b'{"content": "ab"}') == Measure(plain, 0)


def test_sizes_add_up() -> None:
    assert Measure(3, 4).plus(Measure(1, 2)) == Measure(4, 6)
    assert Measure(3, 4).minus(Measure(1, 6)) == Measure(2, 0)


def test_before_anything_was_measured_the_usual_ratios_count() -> None:
    assert Calibration().tokens(Measure(400, 0)) == 100
    assert Calibration().tokens(Measure(0, 250)) == 100
    assert Calibration().tokens(Measure(1, 0)) == 1


def test_each_script_learns_from_texts_that_are_mostly_in_it() -> None:
    learned = Calibration().learned(Measure(3000, 0), 1000)
    assert learned.tokens(Measure(300, 0)) == 100
    assert learned.tokens(Measure(0, 250)) == 100, "the other script stays as it was"
    both = learned.learned(Measure(300, 3000), 1100)  # 100 of them plain
    assert both.tokens(Measure(0, 300)) == 100
    assert both.tokens(Measure(300, 300)) == 200


def test_a_mixed_text_and_a_senseless_count_teach_nothing() -> None:
    start = Calibration()
    assert start.learned(Measure(400, 250), 700) == start
    assert start.learned(Measure(4000, 0), 3) == start
    assert start.learned(Measure(4000, 0), -50) == start


def test_context_g6_g8_other_scripts_are_counted_neither_as_latin_nor_twice() -> None:
    """A vocabulary such as o200k takes .79 tokens for a Chinese character, so 126 for 160 of them."""
    start = Calibration()
    latin, han = json.dumps("x" * 160), "\u4e2d" * 160
    assert start.tokens(measure(latin.encode())) == 41
    for ascii_only in (True, False):
        found = start.tokens(measure(json.dumps(han, ensure_ascii=ascii_only).encode()))
        assert 126 <= found < 2 * 126
    size = measure(("\u4e2d" * 85_000).encode())
    assert 67_150 <= start.tokens(size) < 2 * 67_150
    # Once a prompt was measured, neither guess is left.
    assert abs(start.learned(size, 67_150).tokens(size) - 67_150) <= 1
