"""`ctxgate pools`: what replicas can do, how servers are started and ended, whether pools answer alike."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ctxgate.gateway.commands import pools_compare, pools_servers
from ctxgate.gateway.commands.check import DEFAULT_CONFIG
from ctxgate.gateway.config_load import ConfigError, read
from ctxgate.gateway.ledger import LedgerError

if TYPE_CHECKING:
    import argparse

    from ctxgate.gateway.config import Config
    from ctxgate.gateway.pool_report import ReplicaReport


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    about = "ask every replica what it can do, reports and renders; costs a few short calls"
    probe = actions.add_parser("probe", help=about, description=about)
    _config_argument(probe)
    probe.add_argument("--pool", help="this pool only")
    probe.add_argument("--json", action="store_true", help="the same as JSON")
    for name, (text, declare) in {**pools_servers.ACTIONS, **pools_compare.ACTIONS}.items():
        action = actions.add_parser(name, help=text, description=text)
        _config_argument(action)
        declare(action)


def _config_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-c", "--config", type=Path, default=DEFAULT_CONFIG, help=f"configuration (default: {DEFAULT_CONFIG})"
    )


def run(args: argparse.Namespace) -> int:
    """Do what was asked; 1 where it failed, saying why."""
    try:
        config = read(args.config).config
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    try:
        if args.action == "probe":
            return _probe(config, args.pool, as_json=args.json)
        if args.action == "compare":
            return pools_compare.run(config, args)
    except (LedgerError, sqlite3.Error, OSError) as error:
        print(f"the ledger, where the calls are booked, cannot be used: {error}", file=sys.stderr)
        return 1
    return pools_servers.run(config, args)


def _probe(config: Config, pool: str | None, *, as_json: bool) -> int:
    """Print what was found; 1 where a replica or a model of it could not be probed, saying which."""
    from ctxgate.gateway import pool_report  # noqa: PLC0415 - heavy: clients and the ledger

    if pool is not None and pool not in config.pools:
        print(f"there is no pool {pool}; known are {', '.join(config.pools)}", file=sys.stderr)
        return 1
    reports = asyncio.run(_probed(config, pool))
    if as_json:
        print(json.dumps(pool_report.as_json(reports), indent=2))
    else:
        print(pool_report.as_text(reports), end="")
    return 1 if any(report.failed for report in reports) else 0


async def _probed(config: Config, pool: str | None) -> list[ReplicaReport]:
    from ctxgate.gateway.assembly import assembled  # noqa: PLC0415 - as above
    from ctxgate.gateway.keys import KeyRing  # noqa: PLC0415 - as above
    from ctxgate.gateway.pool_report import probed  # noqa: PLC0415 - as above

    async with assembled(config, KeyRing(config.keys)) as services:
        records = [one for one in services.fleet.records() if pool in (None, one.pool.name)]
        return [await probed(services, record) for record in records]
