"""The ledger in a SQLite file (WAL): the embedded default, shared by the gateways of one machine."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from ctxgate.gateway.ledger import LedgerClosed, LedgerUnavailable
from ctxgate.gateway.stores import recovery, schema, spill
from ctxgate.gateway.stores.checkpoint import Checkpointer
from ctxgate.gateway.stores.incarnation import Incarnation
from ctxgate.gateway.stores.overflow import CHUNK, Overflow, sync_log
from ctxgate.gateway.stores.reader import LedgerReader
from ctxgate.gateway.stores.sqlite_archive import SqliteArchive
from ctxgate.gateway.stores.sqlite_forms import SqliteForms
from ctxgate.gateway.stores.transactions import Transactions
from ctxgate.gateway.stores.watch import FileWatch
from ctxgate.gateway.stores.writer import RETRY_DELAYS_S, Writer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ctxgate.gateway.ledger import AttemptOpened, AttemptSettled, MissRow, Page, ReportRow, SavingRow

log = logging.getLogger(__name__)

Synchronous: TypeAlias = Literal["NORMAL", "FULL"]
BUSY_TIMEOUT_S: Final = 5.0


class SqliteLedger:
    """`Ledger` on one SQLite file.

    `synchronous` NORMAL survives the death of the process at any instant, FULL also that of the
    machine's power. `price` prices what is known of an attempt whose process died; a LookupError from it
    leaves the cost unknown. The constructor blocks (it creates or migrates the file) and raises
    SchemaMismatch, sqlite3.Error or OSError; the ledger then belongs to the event loop that first uses it.
    """

    def __init__(
        self,
        path: Path,
        *,
        price: recovery.Price,
        synchronous: Synchronous = "NORMAL",
        busy_timeout_s: float = BUSY_TIMEOUT_S,
        retry_delays_s: tuple[float, ...] = RETRY_DELAYS_S,
        incarnation: str | None = None,
    ) -> None:
        self.path = path
        self._price = price
        self._spill_folder = path.with_name(f"{path.name}.spill")
        _create_private(path)
        self._process = Incarnation(path.with_name(f"{path.name}.locks"), incarnation or uuid.uuid4().hex)
        try:
            with self._process.exclusively():
                connection = schema.connect(path, busy_timeout_s=busy_timeout_s, synchronous=synchronous)
                self._reader = LedgerReader(path, busy_timeout_s=busy_timeout_s)
        except BaseException:
            self._process.end()
            raise
        self._file = FileWatch(path)
        self._checkpointer = Checkpointer(path, watch=self._file)
        self._writer = Writer(
            Transactions(connection, self._process.name, file=self._file, busy_timeout_s=busy_timeout_s),
            committed=self._checkpointer.count,
            overflow=Overflow(self._spill_folder / self._process.name, path),
            retry_delays_s=retry_delays_s,
        )
        self.forms = SqliteForms(path, self._writer, busy_timeout_s=busy_timeout_s)
        self.archive = SqliteArchive(path, self._writer, busy_timeout_s=busy_timeout_s)
        self._reports = ThreadPoolExecutor(1, thread_name_prefix="ledger-reader")
        self._recovery = threading.Lock()  # held while the writer must not stop
        self._closed = False
        self._closing: asyncio.Future[None] | None = None

    @property
    def incarnation(self) -> str:
        """The name of this process's life, as its rows carry it."""
        return self._process.name

    @property
    def pending(self) -> int:
        """Openings and settlements that are not durable yet."""
        return self._writer.pending

    @property
    def healthy(self) -> bool:
        """See `Ledger.healthy`."""
        return self.problem is None

    @property
    def problem(self) -> str | None:
        """See `Ledger.problem`."""
        if self._file.lost:
            return "the ledger's file was deleted or replaced"
        if self._writer.failing:
            return "the ledger refuses writes"
        return None

    @property
    def failures(self) -> int:
        """Transactions that failed since the start."""
        return self._writer.failures

    def open(self, row: AttemptOpened) -> asyncio.Future[None]:
        """See `Ledger.open`. Never blocks; await the future for backpressure."""
        self._refuse_if_closed()
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._writer.open(row, future)
        return future

    def settle(self, row: AttemptSettled) -> asyncio.Future[bool]:
        """See `Ledger.settle`. Never blocks and is never refused for load."""
        self._refuse_if_closed()
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._writer.settle(row, future)
        return future

    async def report(
        self,
        by: str,
        *,
        where: Mapping[str, str] | None = None,
        since_us: int = 0,
        until_us: int | None = None,
        dearest_first: bool = False,
        limit: int | None = None,
        offset: int = 0,
    ) -> list[ReportRow]:
        """See `Ledger.report`. Runs in a thread with a read-only connection of its own."""
        self._refuse_if_closed()
        query = partial(
            self._reader.report,
            by,
            where=where,
            since_us=since_us,
            until_us=until_us,
            dearest_first=dearest_first,
            limit=limit,
            offset=offset,
        )
        return await asyncio.get_running_loop().run_in_executor(self._reports, query)

    async def misses(
        self, *, where: Mapping[str, str] | None = None, since_us: int = 0, until_us: int | None = None
    ) -> list[MissRow]:
        """See `Ledger.misses`. Runs in a thread with a read-only connection of its own."""
        self._refuse_if_closed()
        query = partial(self._reader.misses, where=where, since_us=since_us, until_us=until_us)
        return await asyncio.get_running_loop().run_in_executor(self._reports, query)

    async def savings(
        self,
        by: str,
        *,
        where: Mapping[str, str] | None = None,
        since_us: int = 0,
        until_us: int | None = None,
    ) -> list[SavingRow]:
        """See `Ledger.savings`. Runs in a thread with a read-only connection of its own."""
        self._refuse_if_closed()
        query = partial(self._reader.savings, by, where=where, since_us=since_us, until_us=until_us)
        return await asyncio.get_running_loop().run_in_executor(self._reports, query)

    async def rows(
        self,
        *,
        where: Mapping[str, str] | None = None,
        since_us: int = 0,
        until_us: int | None = None,
        limit: int = 100,
        cursor: str | None = None,
        newest_first: bool = False,
    ) -> Page:
        """See `Ledger.rows`. Runs in a thread with a read-only connection of its own."""
        self._refuse_if_closed()
        query = partial(
            self._reader.rows,
            where=where,
            since_us=since_us,
            until_us=until_us,
            limit=limit,
            cursor=cursor,
            newest_first=newest_first,
        )
        return await asyncio.get_running_loop().run_in_executor(self._reports, query)

    async def recover(self) -> list[str]:
        """See `Ledger.recover`. First writes what dead processes spilled."""
        self._refuse_if_closed()
        return await asyncio.to_thread(self._recover)

    async def close(self) -> None:
        """See `Ledger.close`. Settlements the database refuses go to the spill file. Idempotent."""
        self._closed = True
        if self._closing is None:
            self._closing = asyncio.ensure_future(asyncio.to_thread(self._stop))
        await asyncio.shield(self._closing)
        if self._writer.error is not None:
            raise LedgerUnavailable(f"{self.path}: settlements were lost at close") from self._writer.error

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise LedgerClosed(f"{self.path}: closed")

    def _stop(self) -> None:
        with self._recovery:
            self._reports.shutdown()
            self.forms.close()
            self.archive.close()
            self._reader.close()  # before the writer's connection, which tidies up as the last one
            self._checkpointer.stop()
            self._writer.stop()
            self._process.end()

    def _recover(self) -> list[str]:
        with self._recovery, self._process.exclusively():
            self._refuse_if_closed()
            self._take_over_spills()
            settled = []
            for name in self._writer.call(recovery.open_incarnations).result():
                if self._process.is_dead(name):
                    settled += self._settle_crashed(name)
            for name in self._process.dead():
                self._process.forget(name)
        if settled:
            log.warning("%d attempts of dead gateway processes are settled as crashed", len(settled))
        return settled

    def _settle_crashed(self, incarnation: str) -> list[str]:
        settled: list[str] = []
        while True:
            now_us = time.time_ns() // 1_000
            step = partial(recovery.settle_crashed, incarnation=incarnation, price=self._price, now_us=now_us)
            chunk = self._writer.call(step).result()
            settled += chunk
            if len(chunk) < recovery.CHUNK:
                return settled

    def _take_over_spills(self) -> None:
        if not self._spill_folder.is_dir():
            return
        for file in sorted(self._spill_folder.iterdir()):
            if not self._process.is_dead(file.name):
                continue
            try:
                written, missing = self._take_over(file)
            except ValueError:
                log.exception("%s: a damaged spill file stays where it is", file)
                continue
            if missing:
                log.error("%s: %d settlements of attempts that were never opened", file, missing)
            sync_log(self.path)
            file.unlink()
            log.warning("%d settlements of an earlier process are written from %s", written, file)

    def _take_over(self, file: Path) -> tuple[int, int]:
        """Write a dead process's spilled settlements; returns how many there are and how many have no row."""
        written = missing = 0
        for rows in spill.chunks(file, CHUNK):
            step = partial(recovery.apply_spilled, rows=rows, incarnation=file.name)
            missing += len(self._writer.call(step).result())
            written += len(rows)
        return written, missing


def check(path: Path) -> None:
    """Create, migrate or just open the ledger, then let go of it; LedgerError where it cannot be used."""
    try:
        _create_private(path)
        schema.connect(path, busy_timeout_s=BUSY_TIMEOUT_S, synchronous="NORMAL").close()
    except sqlite3.Error as error:
        raise LedgerUnavailable(f"{path}: {error}") from error
    except OSError as error:
        raise LedgerUnavailable(f"{path}: {error.strerror}") from error


def _create_private(path: Path) -> None:
    """Create the file readable by its owner alone; SQLite gives its side files the same mode."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:  # exclusively: closing a descriptor of an open database would drop SQLite's locks on it
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return
