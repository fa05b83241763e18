"""What context management saved, as text table, JSON and CSV. Pure."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from typing import TYPE_CHECKING, Final

from ctxgate.gateway.ledger import SavingRow
from ctxgate.gateway.report_table import OWNERS, dollars, owner, printable, ruled, sort_key, summed
from ctxgate.inference.rates import format_usd

if TYPE_CHECKING:
    from collections.abc import Sequence

COLUMNS: Final = """\
requests      distinct requests of clients; compacted: those whose own prompt was longer
removed       tokens by which those prompts were longer, estimated
calls         calls of the gateway's own (summaries, look-ups), and their part of the cost
cost USD      what was paid, these calls included
plain USD     what the clients' own prompts would have cost, as far as they fit the window
fixed USD     what they would have cost, compacted at 80 % of the window
saved USD     plain less cost: below zero where compaction has cost more than it saved so far
part cost     attempts with an unknown part of their cost, which the sums leave out
"""
"""What the table's columns mean, for a help text."""

_HEADER: Final = (
    "requests",
    "compacted",
    "removed",
    "calls",
    "calls USD",
    "cost USD",
    "plain USD",
    "fixed USD",
    "saved USD",
    "part cost",
)
_COUNTS: Final = ("requests", "compacted", "removed_tokens", "calls")
_MONEY: Final = ("calls", "cost", "plain", "fixed", "saved")


def total(rows: Sequence[SavingRow], name: str = "total") -> SavingRow:
    """The sum of rows. A request with attempts in several groups counts once in each."""
    return summed(SavingRow, rows, name)


def as_table(rows: Sequence[SavingRow], by: str, *, totals: SavingRow | None = None) -> str:
    """An aligned table, the group first that saved most (days in order), with a line of totals.

    `totals` replaces the plain sum where the caller knows better, as with distinct requests. A name that
    several rows share is followed by its owner.
    """
    if not rows:
        return "Nothing matched: there is no settled attempt here.\n"
    shown = list(rows) if by == "day" else sorted(rows, key=lambda row: (-row.saved_nano, *sort_key(row)))
    uses = Counter(row.group for row in rows)
    last = totals if totals is not None else total(rows)
    names = [row.group if uses[row.group] == 1 else f"{row.group} ({owner(row, by)})" for row in shown]
    cells = [_cells(row, name) for row, name in zip(shown, names, strict=True)]
    return "\n".join(ruled([(by, *_HEADER), *cells, _cells(last, last.group)])) + "\n"


def as_json(rows: Sequence[SavingRow], by: str, *, totals: SavingRow | None = None) -> str:
    """A JSON object: `by`, `rows` and `total`; money as integer nano-dollars and as a decimal string."""
    last = totals if totals is not None else total(rows)
    owners = OWNERS.get(by, ())
    document = {"by": by, "rows": [_record(row, owners) for row in rows], "total": _record(last, ())}
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def as_csv(rows: Sequence[SavingRow], by: str) -> str:
    """CSV with a header line, without totals."""
    text = io.StringIO()
    owners = OWNERS.get(by, ())
    writer = csv.DictWriter(text, list(_record(total(()), owners)), lineterminator="\n")
    writer.writerow({name: by if name == "group" else name for name in writer.fieldnames})
    writer.writerows(_record(row, owners) for row in rows)
    return text.getvalue()


def _record(row: SavingRow, owners: Sequence[str]) -> dict[str, str | int | None]:
    money = {name: getattr(row, f"{name}_nano") for name in _MONEY}
    return {
        **{name: getattr(row, name) for name in ("group", *owners, *_COUNTS)},
        **{f"{name}_nano": nano for name, nano in money.items()},
        **{f"{name}_usd": format_usd(nano) for name, nano in money.items()},
        "unknown_cost": row.unknown_cost,
    }


def _cells(row: SavingRow, name: str) -> tuple[str, ...]:
    return (
        printable(name),
        *(f"{getattr(row, count):,}" for count in _COUNTS),
        *(dollars(getattr(row, f"{money}_nano")) for money in _MONEY),
        f"{row.unknown_cost:,}",
    )
