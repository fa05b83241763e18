"""Two computations that ask at the same time ask once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ctxgate.compression.ask import Ask, together

if TYPE_CHECKING:
    from ctxgate.compression.ask import Asking


def asking(*names: bytes) -> Asking[list[bytes]]:
    """Claims each name in turn, reads the one before it, and returns the answers."""
    found = []
    for at, name in enumerate(names):
        answer = yield Ask({name: b"mine " + name}, names[at - 1 : at])
        found.append(answer[name])
    return found


def played(work: Asking[object]) -> tuple[list[tuple[set[bytes], set[bytes]]], object]:
    """The questions, and what comes of them."""
    asked: list[tuple[set[bytes], set[bytes]]] = []
    try:
        ask = next(work)
        while True:
            asked.append((set(ask.claims), set(ask.reads)))
            assert len(ask.reads) == len(set(ask.reads))
            ask = work.send({key: b"first " + key for key in (*ask.claims, *ask.reads)})
    except StopIteration as end:
        return asked, end.value


def test_questions_are_joined_and_answers_shared() -> None:
    asked, result = played(together(asking(b"a", b"b"), asking(b"x", b"y", b"z")))
    assert asked == [({b"a", b"x"}, set()), ({b"b", b"y"}, {b"a", b"x"}), ({b"z"}, {b"y"})]
    assert result == ([b"first a", b"first b"], [b"first x", b"first y", b"first z"])


def test_one_that_asks_nothing_is_done_at_once() -> None:
    assert played(together(asking(), asking())) == ([], ([], []))
    asked, result = played(together(asking(), asking(b"a")))
    assert asked == [({b"a"}, set())]
    assert result == ([], [b"first a"])


def test_what_one_claims_is_not_read_as_well() -> None:
    asked, _ = played(together(asking(b"a", b"b"), asking(b"x", b"a")))
    assert asked[1] == ({b"a", b"b"}, {b"x"})


def test_an_error_of_one_ends_both() -> None:
    def broken() -> Asking[None]:
        yield Ask({b"k": b""})
        raise ValueError("a defect")

    with pytest.raises(ValueError, match="a defect"):
        played(together(asking(b"a", b"b"), broken()))
