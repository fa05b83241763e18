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
    assert Measure(3, 4, 5).plus(Measure(0, 0, 2)) == Measure(3, 4, 7)
    assert Measure(3, 4, 5).minus(Measure(9, 9, 2)) == Measure(media=3) == Measure(1, 2, 3).of_media()


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


def test_pictures_are_learned_from_prompts_that_are_mostly_pictures() -> None:
    """A picture counts as 4,000 bytes; where one is measured as 2,500 tokens, so is the next."""
    start, picture = Calibration(), Measure(media=4000)
    assert start.tokens(picture) == 1000
    learned = start.learned(Measure(400, 0, 4000), 2600)  # 100 of them are text
    assert learned.tokens(picture) == 2500
    assert learned.tokens(Measure(400, 0)) == 100
    assert start.learned(Measure(8000, 0, 4000), 9000) == start, "whose tokens they are cannot be told"


def test_context_g3_after_the_last_usage_a_picture_counts_by_its_kind() -> None:
    """2.5 MiB of base64 are no 650,000 tokens; the text beside them counts as ever."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBO" * 655_360}}
    text = {"type": "text", "text": "What is this?"}
    document = {"role": "user", "content": [text, image]}
    size = measure(json.dumps(document, separators=(",", ":")).encode())
    rest = json.dumps({"role": "user", "content": [text, 0]}, separators=(",", ":"))
    assert size == Measure(len(rest) - 1, 0, 4 * 1000)
    assert Calibration().tokens(size) < 1100
