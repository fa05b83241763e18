"""Whether two pools are equally good: agreement of their answers and pass rates, with intervals. Pure.

Wilson   the interval of a share that few cases tell; it stays between 0 and 1
McNemar  the exact test whether one pool passes more of the same cases: only those count where one
         passes and the other does not
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from math import comb, sqrt
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Z95: Final = 1.959963984540054
"""Standard deviations of a normal distribution that hold 95 % of it."""

CHECKS: Final = ("contains", "equals", "json", "regex", "tool")


class BadCases(Exception):
    """A file of cases cannot be used; the message names the line."""


@dataclass(frozen=True, slots=True)
class Case:
    """One request, without model and stream, and the check of its answer; `check` is empty without one."""

    name: str
    body: Mapping[str, Any]
    check: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a pool said: text, and tool calls as (name, arguments as canonical JSON). None where it failed."""

    text: str
    calls: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Share:
    """`count` of `total`, and the 95 % interval of the share behind it."""

    count: int
    total: int

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's interval; the whole range where nothing was counted."""
        if not self.total:
            return 0.0, 1.0
        share, square = self.count / self.total, Z95 * Z95
        middle = (share + square / (2 * self.total)) / (1 + square / self.total)
        spread = share * (1 - share) / self.total + square / (4 * self.total * self.total)
        half = Z95 / (1 + square / self.total) * sqrt(spread)
        return max(0.0, middle - half), min(1.0, middle + half)

    @property
    def share(self) -> float | None:
        """The share, None where nothing was counted."""
        return self.count / self.total if self.total else None


@dataclass(frozen=True, slots=True)
class Outcome:
    """One case at both pools."""

    case: Case
    first: Answer | None
    second: Answer | None

    @property
    def agrees(self) -> bool | None:
        """Whether both say the same; None where one failed."""
        if self.first is None or self.second is None:
            return None
        return same(self.first, self.second)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The figures of all cases. `only_first`, `only_second`: cases that one passes and the other does not."""

    agreement: Share
    first_passes: Share
    second_passes: Share
    only_first: int
    only_second: int
    failed: int

    @property
    def p_value(self) -> float:
        """How likely so uneven a split is where both pools are equally good (exact, two-sided)."""
        return mcnemar(self.only_first, self.only_second)


def read_cases(text: str) -> list[Case]:
    """Cases from lines of JSON: a chat request's fields, an `id` and an `expect`. Raises `BadCases`."""
    cases: list[Case] = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            cases.append(_case(line, number))
    if not cases:
        raise BadCases("there is no case")
    return cases


def _case(line: str, number: int) -> Case:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        raise BadCases(f"line {number} is not JSON") from None
    if not isinstance(document, dict) or not isinstance(document.get("messages"), list):
        raise BadCases(f"line {number} needs messages: a list")
    check = document.pop("expect", {})
    if isinstance(check, str):
        check = {"contains": check}
    if not isinstance(check, dict) or not set(check) <= set(CHECKS):
        raise BadCases(f"line {number}: expect is a text, or a mapping with {', '.join(CHECKS)}")
    _checkable(check, number)
    name = document.pop("id", f"line {number}")
    body = {key: value for key, value in document.items() if key not in ("model", "stream", "stream_options")}
    return Case(str(name), {"temperature": 0, "seed": 0} | body, check)


def _checkable(check: Mapping[str, Any], number: int) -> None:
    for name in ("contains", "equals", "regex", "tool"):
        if name in check and not isinstance(check[name], str):
            raise BadCases(f"line {number}: expect.{name} is a text")
    if check.get("json", True) is not True:
        raise BadCases(f"line {number}: expect.json is true, or is left out")
    try:
        re.compile(check.get("regex", ""))
    except re.error:
        raise BadCases(f"line {number}: expect.regex is no regular expression") from None


def same(one: Answer, other: Answer) -> bool:
    """Whether two answers are the same but for white space, and for the spelling of calls' arguments."""
    return one.text.split() == other.text.split() and one.calls == other.calls


def passes(answer: Answer | None, check: Mapping[str, Any]) -> bool:
    """Whether an answer holds to every part of a check; a pool that failed does not."""
    if answer is None:
        return False
    text = answer.text.strip()
    called = {name for name, _ in answer.calls}
    return (
        check.get("contains", "") in text
        and ("equals" not in check or text.split() == check["equals"].split())
        and ("regex" not in check or re.search(check["regex"], text) is not None)
        and ("tool" not in check or check["tool"] in called)
        and ("json" not in check or _is_json(text))
    )


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def read_answer(document: Any) -> Answer | None:
    """The answer in a chat completion, None where there is none."""
    try:
        message = document["choices"][0]["message"]
        calls = [
            (call["function"]["name"], _canonical(call["function"]["arguments"]))
            for call in message.get("tool_calls") or ()
        ]
    except (LookupError, TypeError, AttributeError):
        return None
    content = message.get("content")
    return Answer(content if isinstance(content, str) else "", tuple(calls))


def _canonical(arguments: Any) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, TypeError, RecursionError):
        return str(arguments)


def compare(outcomes: Sequence[Outcome]) -> Comparison:
    """The figures. Agreement counts cases that both answered; passes count cases that have a check."""
    agrees = [agreed for one in outcomes if (agreed := one.agrees) is not None]
    checked = [
        (passes(one.first, one.case.check), passes(one.second, one.case.check))
        for one in outcomes
        if one.case.check
    ]
    return Comparison(
        Share(sum(agrees), len(agrees)),
        Share(sum(first for first, _ in checked), len(checked)),
        Share(sum(second for _, second in checked), len(checked)),
        sum(first and not second for first, second in checked),
        sum(second and not first for first, second in checked),
        len(outcomes) - len(agrees),
    )


def mcnemar(one: int, other: int) -> float:
    """The exact two-sided p-value of a split of discordant pairs, as of throws of a fair coin."""
    total = one + other
    tail = sum(comb(total, count) for count in range(min(one, other) + 1))
    return min(1.0, float(2 * tail / 2**total))
