"""One gateway process of the ledger's tests: opens and settles attempts, telling what is durable.

Usage: ledger_process.py DATABASE NAME ATTEMPTS CONCURRENCY. Prints `ready`, then for each attempt
`opened ID` and `settled ID`, each once its future has resolved; every tenth attempt stays open.
"""

import asyncio
import sys
from pathlib import Path

from ctxgate.gateway.stores.sqlite import SqliteLedger
from support.ledgers import opened, price, settled


def tell(line: str) -> None:
    """One write per line, so that a kill never leaves half of one."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def attempt(ledger: SqliteLedger, attempt_id: str, stay_open: bool) -> None:
    await ledger.open(opened(attempt_id))
    tell(f"opened {attempt_id}")
    if not stay_open:
        assert await ledger.settle(settled(attempt_id))
        tell(f"settled {attempt_id}")


async def main(database: str, name: str, attempts: int, concurrency: int) -> None:
    ledger = SqliteLedger(Path(database), price=price)
    tell("ready")
    numbers = iter(range(attempts))

    async def worker() -> None:
        for number in numbers:
            await attempt(ledger, f"{name}-{number}", stay_open=number % 10 == 9)

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    await ledger.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
