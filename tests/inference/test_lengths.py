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
