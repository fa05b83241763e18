"""The detector's cost is linear and bounded, told by the shapes of its patterns and by counted steps."""

from __future__ import annotations

import re
from re import _constants as ops  # type: ignore[attr-defined]  # the parsed pattern is CPython's own
from re import _parser as parser  # type: ignore[attr-defined]  # as above
from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.compression import volatile_context, volatile_patterns
from ctxgate.compression.volatile import find_volatile
from support.volatile_lines import POSITIVE, parsed

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.integration

SCANNED = {
    f"{module.__name__.rpartition('.')[2]}.{name}": value
    for module in (volatile_patterns, volatile_context)
    for name, value in vars(module).items()
    if isinstance(value, re.Pattern)
}
# An unbounded repeat is only used on the words before a match, which are at most 64 characters.
ON_CONTEXT = {"volatile_context._WORDS"}


def width(pattern: re.Pattern[str]) -> int:
    """The most characters that a match can have; what it looks at lies within, or one character beside it."""
    most: int = parser.parse(pattern.pattern, pattern.flags & ~re.UNICODE).getwidth()[1]
    return most


ADVERSARIAL = [
    "a",
    "1",
    "1,",
    "0-",
    "/tmp/",
    "tmp",
    "step ",
    "step 1 of ",
    "tokens ",
    "Mon, ",
    "12:34",
    "2026-01-05",
    "2026-01-05T",
    "aB3/",
    "deadbeef",
    "deadbeef-",
    " ",
    "\n",
    " M a\n",
    "On branch ",
    "current date and time ",
    "is the ",
    "$1.",
    "branch: ",
]


class Steps:
    """A plain backtracking matcher of parsed patterns that counts what it compares."""

    def __init__(self, pattern: re.Pattern[str], text: str) -> None:
        self.tree = list(parser.parse(pattern.pattern, pattern.flags & ~re.UNICODE))
        self.fold = bool(pattern.flags & re.IGNORECASE)
        self.text = text
        self.count = 0

    def end(self, start: int) -> int | None:
        return next(self._all(self.tree, start), None)

    def _all(self, tree: list[Any], at: int) -> Iterator[int]:
        if not tree:
            yield at
            return
        for end in self._one(tree[0], at):
            yield from self._all(tree[1:], end)

    def _one(self, node: Any, at: int) -> Iterator[int]:
        op, argument = node
        self.count += 1
        if op is ops.BRANCH:
            for branch in argument[1]:
                yield from self._all(list(branch), at)
        elif op is ops.SUBPATTERN:
            yield from self._all(list(argument[-1]), at)
        elif op is ops.MAX_REPEAT:
            yield from self._repeat(list(argument[2]), at, *argument[:2])
        elif op in (ops.ASSERT, ops.ASSERT_NOT):
            behind, inner = argument
            place = at - inner.getwidth()[0] if behind < 0 else at
            found = place >= 0 and next(self._all(list(inner), place), None) is not None
            if found is (op is ops.ASSERT):
                yield at
        elif op is ops.AT:
            if self._at(argument, at):
                yield at
        elif at < len(self.text) and self._takes(op, argument, self.text[at]):
            yield at + 1

    def _repeat(self, item: list[Any], at: int, least: int, most: int) -> Iterator[int]:
        if most > 0:
            for end in self._all(item, at):
                if end > at:
                    yield from self._repeat(item, end, max(least - 1, 0), most - 1)
        if least == 0:
            yield at

    def _at(self, where: Any, at: int) -> bool:
        if where is ops.AT_BOUNDARY:
            sides = [
                bool(re.match(r"\w", side))
                for side in (self.text[max(at - 1, 0) : at], self.text[at : at + 1])
            ]
            return sides[0] is not sides[1]
        if where is ops.AT_BEGINNING:
            return self.text[:at][-1:] in ("", "\n")
        assert where is ops.AT_END, where
        return self.text[at : at + 1] in ("", "\n")

    def _takes(self, op: Any, argument: Any, character: str) -> bool:
        if op is ops.IN:
            negate = argument[0][0] is ops.NEGATE
            return any(self._takes(item[0], item[1], character) for item in argument[negate:]) is not negate
        if op is ops.CATEGORY:
            return bool(re.fullmatch(CLASSES[argument], character))
        variants = {ord(character), *(map(ord, character.swapcase()) if self.fold else ())}
        if op is ops.RANGE:
            return any(argument[0] <= one <= argument[1] for one in variants)
        if op is ops.NOT_LITERAL:
            return argument not in variants
        assert op is ops.LITERAL, op
        return argument in variants


CLASSES = {
    ops.CATEGORY_DIGIT: r"\d",
    ops.CATEGORY_NOT_DIGIT: r"\D",
    ops.CATEGORY_SPACE: r"\s",
    ops.CATEGORY_NOT_SPACE: r"\S",
    ops.CATEGORY_WORD: r"\w",
}


@pytest.mark.parametrize("name", sorted(SCANNED.keys() - ON_CONTEXT))
def test_a_pattern_is_bounded_in_width_so_that_its_cost_is_linear(name: str) -> None:
    assert width(SCANNED[name]) <= 400


@pytest.mark.parametrize("name", sorted(SCANNED.keys() - ON_CONTEXT))
def test_few_steps_from_any_one_place_of_hostile_text(name: str) -> None:
    for unit in ADVERSARIAL:
        text = unit * (160 // len(unit))
        for start in range(len(unit) + 1):
            steps = Steps(SCANNED[name], text)
            steps.end(start)
            assert steps.count <= 4_000, (unit, start)


def test_the_step_counter_matches_like_re_and_sees_what_explodes() -> None:
    for _, marked in POSITIVE[::3]:
        text = parsed(marked)[0]
        for pattern in SCANNED.values():
            if pattern not in (SCANNED[name] for name in ON_CONTEXT):
                for start in range(0, len(text), 11):
                    match = pattern.match(text, start)
                    assert Steps(pattern, text).end(start) == (match and match.end()), (pattern, text)
    exploding = Steps(re.compile("(?:a{1,9}){1,9}b"), "a" * 14)
    exploding.end(0)
    assert exploding.count > 4_000


MEGABYTES = {"a", "aB3/"}


@pytest.mark.parametrize("unit", ADVERSARIAL)
def test_hostile_text_up_to_a_megabyte_is_looked_at_a_bounded_number_of_times(
    unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts the look-backs, the only work beyond one pass of each pattern."""
    seen = 0
    plain = volatile_context.before

    def counting(text: str, at: int) -> str:
        nonlocal seen
        label = plain(text, at)
        seen += 1 + len(label)
        return label

    monkeypatch.setattr(volatile_context, "before", counting)
    size = 2**20 if unit in MEGABYTES else 2**14
    text = unit * (size // len(unit))
    find_volatile(text)
    assert seen <= 65 * 3 * len(text)
