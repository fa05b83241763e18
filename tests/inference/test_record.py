"""Records are values: immutable, equal by their fields, told apart by their type."""

from __future__ import annotations

import copy
import pickle

import msgspec
import pytest

from ctxgate.inference.record import Record


class Point(Record, frozen=True):
    """A place."""

    x: int
    y: int = 0


class Other(Record, frozen=True):
    """Another type of the same fields."""

    x: int
    y: int = 0


def test_a_record_is_immutable() -> None:
    with pytest.raises(AttributeError):
        Point(1).x = 2  # type: ignore[misc]  # what the test is about
    with pytest.raises(AttributeError):
        Point(1).z = 2  # type: ignore[attr-defined]  # no room for more


def test_equal_fields_make_equal_values_of_one_type() -> None:
    assert Point(1, 2) == Point(x=1, y=2) != Point(1, 3)
    assert Point(1, 2) != Other(1, 2)  # type: ignore[comparison-overlap]  # what the test is about
    assert len({Point(1, 2), Point(1, 2), Point(2, 1)}) == 2
    assert repr(Point(1, 2)) == "Point(x=1, y=2)"


def test_a_copy_with_changes_leaves_the_original() -> None:
    point = Point(1, 2)
    assert msgspec.structs.replace(point, y=5) == Point(1, 5)
    assert point == Point(1, 2) == copy.deepcopy(point) == pickle.loads(pickle.dumps(point))


def test_a_missing_field_is_an_error() -> None:
    with pytest.raises(TypeError):
        Point()  # type: ignore[call-arg]  # what the test is about
