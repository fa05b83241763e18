"""Reports as text table, JSON and CSV. Pure."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from typing import TYPE_CHECKING, Final

import msgspec

from ctxgate.gateway.ledger import OWN_ORGANISATION, ReportRow
from ctxgate.gateway.report_table import OWNERS, dollars, numbers, owner, printable, ruled, sort_key, summed
from ctxgate.inference.rates import format_usd

if TYPE_CHECKING:
    from collections.abc import Sequence

COLUMNS: Final = """\
requests      distinct requests; one that was tried twice is one request of two attempts
cached        prompt tokens read from the prefix cache; uncached: those computed
hit           cached share of the prompt tokens
cost USD      exact sum of what is known
estimated     attempts with a token count that is an estimate
part tokens   attempts with an unknown token count, which the sums leave out
part cost     attempts with an unknown part of their cost: the sum is a lower bound
A row marked as the gateway's own holds calls that it made for itself, of the organisation `ctxgate`: it
asks each replica at start what it can do. They cost money, so the totals hold them.
"""
"""What the table's columns mean, for a help text."""

_COUNTS: Final = numbers(ReportRow)
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
    "part tokens",
    "part cost",
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
    return summed(ReportRow, rows, name)


def as_table(rows: Sequence[ReportRow], by: str, *, totals: ReportRow | None = None) -> str:
    """An aligned table, the dearest group first (days in order), with a line of totals.

    `totals` replaces the plain sum where the caller knows better, as with distinct requests. A name that
    several rows share is followed by its owner.
    """
    if not rows:
        return "Nothing matched: there is no settled attempt here.\n"
    shown = list(rows) if by == "day" else sorted(rows, key=lambda row: (-row.cost_nano, *sort_key(row)))
    uses = Counter(row.group for row in rows)
    last = totals if totals is not None else total(rows)
    names = [_name(row, by, shared=uses[row.group] > 1) for row in shown]
    cells = [_cells(row, name) for row, name in zip(shown, names, strict=True)]
    return "\n".join([*ruled([(by, *_HEADER), *cells, _cells(last, last.group)]), *_remarks(last)]) + "\n"


def as_json(rows: Sequence[ReportRow], by: str, *, totals: ReportRow | None = None) -> str:
    """A JSON object: `by`, `rows` and `total`; money as integer nano-dollars and as a decimal string."""
    return json.dumps(_document(rows, by, totals), indent=2, ensure_ascii=False) + "\n"


def as_page(
    rows: Sequence[ReportRow], by: str, *, limit: int, offset: int, totals: ReportRow | None = None
) -> bytes:
    """The same in compact JSON, of `limit` rows at most, and where the `next` ones start (or null).

    `rows` begin at `offset` and are one more than `limit` where others follow.
    """
    page = _document(rows[:limit], by, totals)
    page["next"] = offset + limit if len(rows) > limit else None
    return msgspec.json.encode(page)


def as_csv(rows: Sequence[ReportRow], by: str) -> str:
    """CSV with a header line, without totals."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    owners = OWNERS.get(by, ())
    writer.writerow([by, *owners, *_COUNTS, "cost_usd"])
    for row in rows:
        values = (getattr(row, column) for column in (*owners, *_COUNTS))
        writer.writerow([row.group, *values, format_usd(row.cost_nano)])
    return text.getvalue()


def _document(rows: Sequence[ReportRow], by: str, totals: ReportRow | None) -> dict[str, object]:
    last = totals if totals is not None else total(rows)
    owners = OWNERS.get(by, ())
    return {"by": by, "rows": [_record(row, owners) for row in rows], "total": _record(last, ())}


def _record(row: ReportRow, owners: Sequence[str]) -> dict[str, str | int | None]:
    columns = ("group", *owners, *_COUNTS)
    return {**{column: getattr(row, column) for column in columns}, "cost_usd": format_usd(row.cost_nano)}


def _name(row: ReportRow, by: str, *, shared: bool) -> str:
    """The group's name, and whose it is where that is not plain: the gateway's own, or one of several."""
    if row.organisation == OWN_ORGANISATION:
        return f"{row.group} (the gateway's own)"
    return f"{row.group} ({owner(row, by)})" if shared else row.group


def _cells(row: ReportRow, name: str) -> tuple[str, ...]:
    return (
        printable(name),
        f"{row.requests:,}",
        f"{row.attempts:,}",
        f"{row.cached_tokens:,}",
        f"{row.uncached_tokens:,}",
        f"{row.output_tokens:,}",
        f"{row.reasoning_tokens:,}",
        hit_ratio(row),
        dollars(row.cost_nano),
        f"{row.estimated:,}",
        f"{row.unknown_tokens:,}",
        f"{row.unknown_cost:,}",
    )


def _remarks(row: ReportRow) -> list[str]:
    remarks = []
    if row.estimated:
        remarks.append(f"estimated: {_attempts(row.estimated)} with a token count that is an estimate.")
    if row.unknown_tokens:
        told = f"{_attempts(row.unknown_tokens)} with an unknown token count, which the sums leave out"
        remarks.append(f"part tokens: {told}.")
    if row.unknown_cost:
        told = f"{_attempts(row.unknown_cost)} with an unknown part of the cost, which is a lower bound"
        remarks.append(f"part cost: {told}.")
    return remarks


def _attempts(number: int) -> str:
    return f"{number:,} attempt{'' if number == 1 else 's'}"
