"""Where one completions prompt leaves another."""

from __future__ import annotations

import json

import pytest

from ctxgate.compression.diverge_text import diverge_texts
from ctxgate.compression.divergence import DivergenceKind as Kind
from ctxgate.compression.volatile import VolatileKind

BODY = "".join(f"line {number} of a prompt that is long enough\n" for number in range(20))


def raw(text: object) -> bytes:
    return json.dumps(text).encode()


def test_a_prompt_that_goes_on_extends() -> None:
    found = diverge_texts(raw(BODY), raw(BODY + "more"))
    assert found is not None
    assert (found.kind, found.rendered, found.kept_bytes) == (Kind.EXTENDS, False, len(raw(BODY)) - 1)
    assert diverge_texts(raw([1, 2]), raw([1, 2, 3])) is not None


def test_what_is_held_behind_another_beginning_is_counted_in_bytes() -> None:
    found = diverge_texts(raw("A" + BODY), raw("BCD" + BODY + "more"))
    assert found is not None
    assert (found.kind, found.field, found.index, found.offset) == (Kind.HISTORY_EDITED, "prompt", 0, 1)
    assert (found.kept_bytes, found.avoidable_bytes) == (1, len(raw(BODY)) - 2)
    assert found.rendered
    assert "line" not in repr(found)


def test_a_clock_at_the_beginning_is_named() -> None:
    one, two = (raw(f"Now: 2026-01-05T09:00:{second}Z\n{BODY}") for second in ("00", "47"))
    found = diverge_texts(one, two)
    assert found is not None
    assert (found.kind, found.volatile) == (Kind.VOLATILE_IN_HEAD, VolatileKind.CLOCK)
    assert found.avoidable_bytes == len(one) - 1 - found.offset - 2


@pytest.mark.parametrize("text", ["", "Something else.", BODY[-200:] + "x", "A" + BODY[: len(BODY) // 3]])
def test_another_prompt_is_no_version_of_it(text: str) -> None:
    assert diverge_texts(raw("Z" + BODY), raw(text)) is None


def test_bytes_that_are_no_text_are_compared_all_the_same() -> None:
    one, two = (b'"' + first + "\u00e9\ud7ff".encode() * 100 + b'"' for first in (b"a\xc3", b"b\xa9"))
    found = diverge_texts(one, two)
    assert found is not None
    assert (found.offset, found.avoidable_bytes) == (1, 500)
