"""`ctxgate report`: tokens and dollars by task, team, pool, model or day."""

from __future__ import annotations

import re
import sqlite3
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ctxgate.gateway import report
from ctxgate.gateway.config_load import load
from ctxgate.gateway.ledger import EVERYTHING, FILTERS, GROUPINGS, LedgerError
from ctxgate.gateway.stores.reader import LedgerReader

if TYPE_CHECKING:
    import argparse

_DEFAULT_CONFIG: Final = Path("configs/ctxgate.yaml")
_SPAN: Final = re.compile(r"(\d+)([smhdw])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--by", choices=GROUPINGS, default="task", help="what to group by (default: task)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="JSON; money in nano-dollars and as decimal string")
    form.add_argument("--csv", action="store_true", help="CSV without totals")
    when = "2026-11-30 or 2026-11-30T12:00 (UTC), or an age such as 90m, 24h, 7d"
    parser.add_argument("--since", metavar="WHEN", help=f"attempts opened from then on: {when}")
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
        now = datetime.fromtimestamp(time.time(), UTC)
        since_us = 0 if args.since is None else instant_us(args.since, now)
        until_us = None if args.until is None else instant_us(args.until, now)
        path = args.db if args.db is not None else load(args.config or _DEFAULT_CONFIG).store
        where = {column: getattr(args, column) for column in FILTERS if getattr(args, column) is not None}
        with LedgerReader(path) as ledger, ledger.snapshot():
            rows = ledger.report(args.by, where=where, since_us=since_us, until_us=until_us)
            everything = ledger.report(EVERYTHING, where=where, since_us=since_us, until_us=until_us)
    except (LedgerError, OSError, sqlite3.Error, ValueError) as error:
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


def instant_us(text: str, now: datetime) -> int:
    """Unix microseconds of a date or time (UTC unless it says otherwise) or of an age before `now`."""
    age = _SPAN.fullmatch(text)
    if age:
        return _microseconds(now) - int(age[1]) * _SECONDS[age[2]] * 1_000_000
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is neither a date such as 2026-11-30 nor an age such as 24h") from error
    return _microseconds(moment if moment.tzinfo else moment.replace(tzinfo=UTC))


def _microseconds(moment: datetime) -> int:
    since_epoch = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return (since_epoch.days * 86_400 + since_epoch.seconds) * 1_000_000 + since_epoch.microseconds
