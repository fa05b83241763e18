"""The tokens of a prompt up to each of its elements: counted where an engine told, else by bytes. Pure."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class Point(NamedTuple):
    """A prompt's tokens up to an element, counted by the engine or apportioned."""

    tokens: int
    counted: bool


def correct(points: list[Point | None], known: int, cached: int | None) -> None:
    """Where a prompt left its first `known` points: the hit told is the tokens of these, to a block."""
    at = known - 1
    point = points[at] if known else None
    if point is None or point.counted or not cached or at == len(points) - 1:
        return
    if point.tokens <= 2 * cached <= 4 * point.tokens:  # else part of it was not in the cache any more
        points[at] = Point(cached, True)


def apportioned(points: Sequence[Point | None], sizes: Sequence[int], prompt: int) -> list[Point]:
    """Every point of a prompt; those behind the last one counted share the rest by bytes."""
    begin, start = 0, 0
    for at in range(len(points) - 2, -1, -1):
        point = points[at]
        if point is not None and point.counted and point.tokens <= prompt:
            begin, start = at + 1, point.tokens
            break
    ends = list(accumulate(sizes[begin:]))
    rest, size = prompt - start, max(ends[-1], 1)
    behind = [Point(start + rest * end // size, False) for end in ends]
    behind[-1] = Point(prompt, True)
    return rising(points[:begin], start) + behind


def rising(points: Sequence[Point | None], most: int) -> list[Point]:
    """Points of which none has fewer tokens than the one before it; mostly they are that already."""
    known = [point for point in points if point is not None]
    told = [point.tokens for point in known]
    if len(known) == len(points) and told == sorted(told) and (not told or told[-1] <= most):
        return known
    tokens, risen = 0, []
    for point in points:  # a forgotten one holds at least what the one before it did
        tokens = tokens if point is None else max(tokens, min(point.tokens, most))
        risen.append(Point(tokens, point is not None and point.counted))
    return risen
