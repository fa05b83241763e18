"""`ctxgate serve` as a process of its own, on a generated configuration."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ctxgate.gateway.keys import digest
from ctxgate.gateway.stores.sqlite import SqliteLedger
from support.gateway import ALPHA, BETA, MODEL, PLAIN
from support.ledgers import price

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from ctxgate.gateway.ledger import Attempt

START_S = 60.0


def configuration(folder: Path, *urls: str) -> Path:
    """A configuration file with one pool over the given servers, its ledger beside it."""
    rates = {
        "effective": "2026-01-01",
        "usd_per_million_uncached": 1,
        "usd_per_million_cached": 0.1,
        "usd_per_million_output": 2,
    }
    keys = [
        {"id": f"{team}-ci", "team": team, "sha256": digest(secret).hex()}
        for team, secret in (("alpha", ALPHA), ("beta", BETA))
    ]
    document = {
        "store": {"sqlite": "ledger.db"},
        "pools": {"standard": {"replicas": list(urls), "rates": rates, **PLAIN}},
        "models": {MODEL: {"pools": ["standard"]}},
        "teams": {"alpha": {"organisation": "acme"}, "beta": {"organisation": "acme"}},
        "keys": keys,
    }
    file = folder / "ctxgate.yaml"
    file.write_text(json.dumps(document))  # JSON is YAML
    return file


@dataclass(slots=True)
class Served:
    """A gateway process that listens."""

    process: asyncio.subprocess.Process
    port: int

    async def ended(self) -> int:
        """Wait for the process to end; its exit code."""
        return await asyncio.wait_for(self.process.wait(), START_S)


@asynccontextmanager
async def serving(file: Path) -> AsyncIterator[Served]:
    """Run `ctxgate serve`; killed in the end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "ctxgate.gateway.cli", "serve", "-c", str(file), "--port", "0"),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), START_S)
        yield Served(process, int(line.decode().rsplit(":", 1)[1]))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def rows_of(file: Path) -> list[Attempt]:
    """The settled rows of the ledger beside a configuration file, read by a process of its own life."""
    ledger = SqliteLedger(file.with_name("ledger.db"), price=price)
    try:
        return list((await ledger.rows(limit=100_000)).attempts)
    finally:
        await ledger.close()
