"""Reports as text table, JSON and CSV. Pure."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Final

from ctxgate.gateway.ledger import ReportRow
from ctxgate.inference.rates import NANO_PER_DOLLAR, format_usd

if TYPE_CHECKING:
    from collections.abc import Sequence

_COUNTS: Final = tuple(field.name for field in fields(ReportRow) if field.name != "group")
_HEADER: Final = (
    "requests",
    "attempts",
    "cached",
    "uncached",
    "output",
    "reasoning",
    "hit",
    "cost USD",
    "estimated",
    "no tokens",
    "no cost",
)


def hit_ratio(row: ReportRow) -> str:
    """Cached share of the known prompt tokens, in per cent with one decimal; "-" without any."""
    prompt = row.cached_tokens + row.uncached_tokens
    if not prompt:
        return "-"
    permille = (2000 * row.cached_tokens + prompt) // (2 * prompt)
    return f"{permille // 10}.{permille % 10}%"


def total(rows: Sequence[ReportRow], name: str = "total") -> ReportRow:
    """The sum of rows. A request with attempts in several groups counts once in each."""
    return ReportRow(name, *(sum(getattr(row, count) for row in rows) for count in _COUNTS))


def as_table(rows: Sequence[ReportRow], by: str, *, totals: ReportRow | None = None) -> str:
    """An aligned table, the dearest group first (days in order), with a line of totals.

    `totals` replaces the plain sum where the caller knows better, as with distinct requests.
    """
    shown = list(rows) if by == "day" else sorted(rows, key=lambda row: (-row.cost_nano, row.group))
    last = totals if totals is not None else total(rows)
    lines = [(by, *_HEADER), *(_cells(row) for row in shown), _cells(last)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    printed = [_aligned(line, widths) for line in lines]
    rule = "-" * len(printed[0])
    return "\n".join([printed[0], rule, *printed[1:-1], rule, printed[-1], *_remarks(last)]) + "\n"


def as_json(rows: Sequence[ReportRow], by: str, *, totals: ReportRow | None = None) -> str:
    """A JSON object: `by`, `rows` and `total`; money as integer nano-dollars and as a decimal string."""
    last = totals if totals is not None else total(rows)
    report = {"by": by, "rows": [_record(row) for row in rows], "total": _record(last)}
    return json.dumps(report, indent=2, ensure_ascii=False) + "\n"


def as_csv(rows: Sequence[ReportRow], by: str) -> str:
    """CSV with a header line, without totals."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([by, *_COUNTS, "cost_usd"])
    for row in rows:
        writer.writerow([row.group, *(getattr(row, count) for count in _COUNTS), format_usd(row.cost_nano)])
    return text.getvalue()


def _record(row: ReportRow) -> dict[str, str | int]:
    return {**asdict(row), "cost_usd": format_usd(row.cost_nano)}


def _cells(row: ReportRow) -> tuple[str, ...]:
    return (
        "".join(character if character.isprintable() else "?" for character in row.group),
        f"{row.requests:,}",
        f"{row.attempts:,}",
        f"{row.cached_tokens:,}",
        f"{row.uncached_tokens:,}",
        f"{row.output_tokens:,}",
        f"{row.reasoning_tokens:,}",
        hit_ratio(row),
        _dollars(row.cost_nano),
        f"{row.estimated:,}",
        f"{row.unknown_tokens:,}",
        f"{row.unknown_cost:,}",
    )


def _dollars(nano: int) -> str:
    """Exact dollars with all nine decimals, so that a column lines up."""
    whole, fraction = divmod(abs(nano), NANO_PER_DOLLAR)
    return f"{'-' if nano < 0 else ''}{whole:,}.{fraction:09d}"


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    numbers = (cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
    return "  ".join([cells[0].ljust(widths[0]), *numbers])


def _remarks(row: ReportRow) -> list[str]:
    remarks = []
    if row.unknown_tokens:
        remarks.append(f"Token sums leave out the unknown counts of {row.unknown_tokens:,} attempts.")
    if row.unknown_cost:
        remarks.append(f"Cost is a lower bound: {row.unknown_cost:,} attempts have an unknown part.")
    return remarks
