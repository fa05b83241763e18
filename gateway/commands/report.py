"""`ctxgate report`: tokens and dollars by task, team, pool, model, day, cause or class; misses; savings."""

from __future__ import annotations

import argparse
import sqlite3
import sys
import textwrap
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ctxgate.gateway import report, report_misses, report_savings
from ctxgate.gateway.config_load import load
from ctxgate.gateway.instants import FORMS, instant_us
from ctxgate.gateway.ledger import EVERYTHING, FILTERS, GROUPINGS, LedgerError, LedgerUnavailable
from ctxgate.gateway.stores.reader import LedgerReader

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ctxgate.gateway.ledger import ReportRow

_DEFAULT_CONFIG: Final = Path("configs/ctxgate.yaml")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        f"columns of the table:\n{textwrap.indent(report.COLUMNS, '  ')}"
        f"\ncolumns with --counterfactual:\n{textwrap.indent(report_savings.COLUMNS, '  ')}"
    )
    parser.add_argument(
        "--counterfactual",
        action="store_true",
        help="what compaction saved: beside the clients' own prompts, and a fixed share of the window",
    )
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--by", choices=GROUPINGS, default="task", help="what to group by (default: task)")
    shape.add_argument(
        "--misses", action="store_true", help="why the prefix cache was missed, what it cost, what to do"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="JSON; money in nano-dollars and as decimal string")
    form.add_argument("--csv", action="store_true", help="CSV without totals")
    parser.add_argument("--since", metavar="WHEN", help=f"attempts opened from then on: {FORMS}")
    parser.add_argument("--until", metavar="WHEN", help="attempts opened before then")
    for column in FILTERS:
        option = "--key" if column == "key_id" else f"--{column}"
        parser.add_argument(option, dest=column, metavar=column.upper(), help=f"of this {column} only")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("-c", "--config", type=Path, help=f"configuration (default: {_DEFAULT_CONFIG})")
    source.add_argument("--db", type=Path, metavar="FILE", help="the ledger file itself")


def run(args: argparse.Namespace) -> int:
    """Print the report; 2 where the ledger or an argument cannot be used."""
    try:
        if args.misses and args.counterfactual:
            raise ValueError("--misses and --counterfactual are two reports: ask for one at a time")
        now = datetime.fromtimestamp(time.time(), UTC)
        since_us = 0 if args.since is None else instant_us(args.since, now)
        until_us = None if args.until is None else instant_us(args.until, now)
        path = args.db if args.db is not None else load(args.config or _DEFAULT_CONFIG).store
        where = {column: getattr(args, column) for column in FILTERS if getattr(args, column) is not None}
        if args.misses:
            sys.stdout.write(_misses(args, path, where, since_us, until_us))
            return 0
        if args.counterfactual:
            sys.stdout.write(_savings(args, path, where, since_us, until_us))
            return 0
        rows, everything = _read(path, args.by, where, since_us, until_us)
    except (LedgerError, OSError, ValueError) as error:
        print(f"ctxgate report: {error}", file=sys.stderr)
        return 2
    totals = everything[0] if everything else None
    if args.json:
        sys.stdout.write(report.as_json(rows, args.by, totals=totals))
    elif args.csv:
        sys.stdout.write(report.as_csv(rows, args.by))
    else:
        sys.stdout.write(report.as_table(rows, args.by, totals=totals))
    return 0


def _misses(
    args: argparse.Namespace, path: Path, where: Mapping[str, str], since_us: int, until_us: int | None
) -> str:
    form = (
        report_misses.as_json if args.json else report_misses.as_csv if args.csv else report_misses.as_table
    )
    try:
        with LedgerReader(path) as ledger:
            return form(ledger.misses(where=where, since_us=since_us, until_us=until_us))
    except sqlite3.Error as error:
        raise LedgerUnavailable(f"{path}: {error}") from error


def _savings(
    args: argparse.Namespace, path: Path, where: Mapping[str, str], since_us: int, until_us: int | None
) -> str:
    try:
        with LedgerReader(path) as ledger, ledger.snapshot():
            rows = ledger.savings(args.by, where=where, since_us=since_us, until_us=until_us)
            everything = ledger.savings(EVERYTHING, where=where, since_us=since_us, until_us=until_us)
    except sqlite3.Error as error:
        raise LedgerUnavailable(f"{path}: {error}") from error
    if args.csv:
        return report_savings.as_csv(rows, args.by)
    form = report_savings.as_json if args.json else report_savings.as_table
    return form(rows, args.by, totals=everything[0] if everything else None)


def _read(
    path: Path, by: str, where: Mapping[str, str], since_us: int, until_us: int | None
) -> tuple[list[ReportRow], list[ReportRow]]:
    """The rows and, from the same state of the ledger, the one row over all of it."""
    try:
        with LedgerReader(path) as ledger, ledger.snapshot():
            rows = ledger.report(by, where=where, since_us=since_us, until_us=until_us)
            everything = ledger.report(EVERYTHING, where=where, since_us=since_us, until_us=until_us)
    except sqlite3.Error as error:
        raise LedgerUnavailable(f"{path}: {error}") from error
    return rows, everything
