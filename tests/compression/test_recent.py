"""What was used last stays, and the memory is bounded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ctxgate.compression.recent import Recent


def test_what_is_used_stays_and_what_is_not_goes() -> None:
    recent: Recent[int, str] = Recent(20)
    recent.put(0, "kept")
    recent.put(1, "forgotten")
    for key in range(2, 40):
        recent.put(key, "x")
        assert recent.get(0) == "kept"
    assert recent.get(1) is None
    assert recent.get(39) == "x"


def test_a_value_put_again_replaces_the_old_one_and_weighs_once() -> None:
    recent: Recent[str, bytes] = Recent(20, len)
    for size in (8, 2, 9, 1):
        recent.put("a", b"x" * size)
        assert recent.get("a") == b"x" * size
    recent.put("b", b"y" * 9)  # beside one byte; both fit in a generation of ten
    assert recent.get("a") == b"x"
    assert recent.get("b") == b"y" * 9


def test_what_is_too_heavy_is_not_kept() -> None:
    recent: Recent[str, bytes] = Recent(20, len)
    recent.put("small", b"x")
    recent.put("big", b"x" * 11)
    assert recent.get("big") is None
    assert recent.get("small") == b"x"


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12), st.booleans()), max_size=200))
def test_it_never_holds_more_than_its_limit_nor_a_wrong_value(steps: list[tuple[int, int, bool]]) -> None:
    recent: Recent[int, int] = Recent(24, lambda weight: weight)
    last: dict[int, int] = {}
    for key, weight, asks in steps:
        if asks:
            assert recent.get(key) in (None, last.get(key))
        elif weight <= 12:
            recent.put(key, weight)
            last[key] = weight
            assert recent.get(key) == weight
        held = [value for generation in (recent._young, recent._old) for value in generation.values()]
        assert sum(held) <= 24


@given(st.lists(st.integers(0, 20), max_size=40), st.lists(st.integers(0, 25), max_size=20))
def test_many_at_once_are_what_one_by_one_would_be(put: list[int], keys: list[int]) -> None:
    """Nothing is forgotten by looking alone, so the order of the looks does not matter."""
    one, two = Recent[int, str](1000), Recent[int, str](1000)
    for recent in (one, two):
        for key in put:
            recent.put(key, str(key))
    assert one.get_all(keys) == [two.get(key) for key in keys]
    assert one.get_all(keys) == [str(key) if key in put else None for key in keys]


def test_what_many_looks_find_is_young_again() -> None:
    recent: Recent[int, str] = Recent(20)
    recent.put(0, "kept")
    for key in range(1, 40):
        recent.put(key, "x")
        assert recent.get_all([0, -1]) == ["kept", None]
