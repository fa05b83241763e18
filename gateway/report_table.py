"""What the tables of all reports share: columns, money, and names that say whose a group is."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from ctxgate.inference.rates import NANO_PER_DOLLAR

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


OWNERS: Final = {"task": ("organisation", "team", "key_id"), "team": ("organisation",)}
"""The fields that tell groups of one name apart, by grouping."""


class Grouped(Protocol):
    """A row of a report: its group, and the tenant it belongs to where the grouping tells."""

    @property
    def group(self) -> str: ...
    @property
    def organisation(self) -> str | None: ...
    @property
    def team(self) -> str | None: ...
    @property
    def key_id(self) -> str | None: ...


R = TypeVar("R", bound=Grouped)


def numbers(kind: Any) -> tuple[str, ...]:
    """The fields of a kind of row that are sums: all but its group and its owner."""
    return tuple(field.name for field in fields(kind) if field.name not in ("group", *OWNERS["task"]))


def summed(kind: Callable[..., R], rows: Sequence[R], name: str) -> R:
    """The sum of rows. A request with attempts in several groups counts once in each."""
    return kind(group=name, **{field: sum(getattr(row, field) for row in rows) for field in numbers(kind)})


def sort_key(row: Grouped) -> tuple[str, ...]:
    """Orders rows that are equal otherwise."""
    return row.group, row.organisation or "", row.team or "", row.key_id or ""


def owner(row: Grouped, by: str) -> str:
    """Whose a row is, where several rows can have one name."""
    return "/".join(str(getattr(row, part)) for part in OWNERS.get(by, ()))


def printable(name: str) -> str:
    """A name as a terminal may show it."""
    return "".join(character if character.isprintable() else "?" for character in name)


def dollars(nano: int) -> str:
    """Exact dollars with all nine decimals, so that a column lines up."""
    whole, fraction = divmod(abs(nano), NANO_PER_DOLLAR)
    return f"{'-' if nano < 0 else ''}{whole:,}.{fraction:09d}"


def aligned(lines: Sequence[Sequence[str]], words: int = 1) -> list[str]:
    """Lines of cells as text: the first `words` columns to the left, numbers to the right."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return ["  ".join(_padded(line, widths, words)) for line in lines]


def ruled(lines: Sequence[Sequence[str]]) -> list[str]:
    """A heading, rows and a last line of totals as text, with rules between."""
    head, *rows, last = aligned(lines)
    rule = "-" * len(head)
    return [head, rule, *rows, rule, last]


def _padded(cells: Sequence[str], widths: Sequence[int], words: int) -> list[str]:
    return [
        cell.ljust(width) if at < words else cell.rjust(width)
        for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
