"""The ledger's writer: one thread, one connection, many queued operations per transaction.

While a commit runs, further operations queue up and share the next one (group commit), so the load
itself sets the size of a transaction and an idle writer commits at once. An operation of bad contents
fails alone; a transaction that fails refuses its openings and keeps its settlements for the next try.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import deque
from concurrent.futures import Future as ThreadFuture
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from ctxgate.gateway.ledger import AttemptConflict, InvalidRow, LedgerError, LedgerUnavailable, UnknownAttempt
from ctxgate.gateway.stores import bulk
from ctxgate.gateway.stores.results import Result, Waiting, deliver, unavailable
from ctxgate.gateway.stores.rows import INSERT, OPENED_COLUMNS, SETTLE, opened_values, settled_values
from ctxgate.gateway.stores.spill import Spilled

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from ctxgate.gateway.ledger import AttemptOpened, AttemptSettled

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_BATCH: Final = 1_000  # operations per transaction; bounds how long others wait for the write lock
MAX_REFUSED: Final = 65_536  # refused openings kept for a settlement that may still come
CONTENTION_PAUSE_S: Final = 0.0002
RETRY_DELAYS_S: Final = (0.01, 0.03, 0.1, 0.3, 1.0)  # the last one repeats
_EXISTING: Final = f"SELECT {', '.join(OPENED_COLUMNS)} FROM attempts WHERE attempt_id = ?"  # noqa: S608  # names
_BAD_CONTENTS: Final = (
    sqlite3.IntegrityError,
    sqlite3.DataError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
    AttributeError,
    OverflowError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, slots=True)
class _Open:
    row: AttemptOpened
    future: asyncio.Future[None]


@dataclass(frozen=True, slots=True)
class _Settle:
    row: AttemptSettled
    future: asyncio.Future[bool]


@dataclass(frozen=True, slots=True)
class _Call:
    function: Callable[[sqlite3.Connection], object]
    future: ThreadFuture[object]


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


_Operation: TypeAlias = _Open | _Settle | _Call


class Writer:
    """Applies queued openings and settlements. `open`, `settle` and `stop` belong to one event loop."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        incarnation: str,
        *,
        committed: Callable[[int], None],
        spill: Callable[[list[Spilled]], None],
        busy_timeout_s: float,
        retry_delays_s: tuple[float, ...] = RETRY_DELAYS_S,
    ) -> None:
        self._connection = connection
        self._incarnation = incarnation
        self._committed = committed
        self._spill = spill
        self._busy_timeout_s = busy_timeout_s
        self._retry_delays_s = retry_delays_s
        self._queue: SimpleQueue[tuple[_Operation | _Stop, ...]] = SimpleQueue()
        self._staged: list[_Open | _Settle] = []
        self._backlog: deque[_Operation] = deque()
        self._refused: dict[str, AttemptOpened] = {}
        self._stopping = False
        self._consecutive_failures = 0
        self._queued = 0
        self._done = 0
        self.failures = 0
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="ledger-writer", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> int:
        """Operations that are queued or kept for another try."""
        return self._queued - self._done

    def open(self, row: AttemptOpened, future: asyncio.Future[None]) -> None:
        """Queue an opening row."""
        self._stage(_Open(row, future))

    def settle(self, row: AttemptSettled, future: asyncio.Future[bool]) -> None:
        """Queue a settlement."""
        self._stage(_Settle(row, future))

    def _stage(self, operation: _Open | _Settle) -> None:
        """Hand an operation to an idle writer now, to a busy one with what else this turn of the loop brings.

        Waking the thread costs more than writing a row.
        """
        idle = not self.pending
        self._queued += 1
        if idle:
            self._queue.put((operation,))
            return
        if not self._staged:
            operation.future.get_loop().call_soon(self._hand_over)
        self._staged.append(operation)

    def _hand_over(self) -> None:
        if self._staged:
            self._queue.put(tuple(self._staged))
            self._staged.clear()

    def call(self, function: Callable[[sqlite3.Connection], T]) -> ThreadFuture[T]:
        """Run a function in a transaction of its own, after what was handed over. From any thread."""
        future: ThreadFuture[T] = ThreadFuture()
        self._queue.put((_Call(function, future),))  # type: ignore[arg-type]  # the future gets the function's T
        return future

    def flush(self) -> None:
        """Hand over what is staged now; for the event loop's thread, before a `stop` on another one."""
        self._hand_over()

    def stop(self) -> None:
        """Write or spill what was handed over and end the thread. Blocks; `error` says if a spill failed."""
        self._queue.put((_Stop(),))
        self._thread.join()

    def _run(self) -> None:
        while self._backlog or not self._stopping:
            self._gather()
            refused = bool(self._backlog) and not self._write_batch()
            if refused and self._stopping and self._backlog:
                self._spill_backlog()
        self._connection.close()

    def _gather(self) -> None:
        """Move what is queued to the backlog; wait while there is nothing to do."""
        if not self._backlog:
            self._accept(self._queue.get())
        elif self._consecutive_failures and not self._stopping:
            self._wait_for_retry()
        for _ in range(self._queue.qsize()):
            self._accept(self._queue.get_nowait())

    def _wait_for_retry(self) -> None:
        position = min(self._consecutive_failures, len(self._retry_delays_s)) - 1
        deadline = time.monotonic() + self._retry_delays_s[position]
        while not self._stopping:
            try:
                self._accept(self._queue.get(timeout=max(0.0, deadline - time.monotonic())))
            except Empty:
                return

    def _accept(self, operations: tuple[_Operation | _Stop, ...]) -> None:
        for operation in operations:
            if isinstance(operation, _Stop):
                self._stopping = True
            else:
                self._backlog.append(operation)

    def _write_batch(self) -> bool:
        """Take the next batch off the backlog and write it; False where the store refused it."""
        first = self._backlog[0]
        if isinstance(first, _Call):
            self._backlog.popleft()
            self._run_call(first)
            return True
        batch = self._take_batch()
        try:
            results = self._apply_at_once(batch) or self._apply_each(batch)
        except Exception as error:  # noqa: BLE001  # a dead writer hangs every request
            self._fail(batch, error)
            return False
        self._succeed(batch, results)
        self._committed(len(batch))
        return True

    def _apply_at_once(self, batch: list[_Open | _Settle]) -> list[Result] | None:
        """Write a batch in few statements; None, and nothing written, unless every operation is a plain one.

        Each statement gives the interpreter's lock away and waits to get it back from a busy event loop,
        so their number is what a busy writer costs. What is not plain, such as an id seen before, is found
        out by writing one operation at a time.
        """
        if self._refused or _settled_before_opened(batch):
            return None
        opened = [operation.row for operation in batch if isinstance(operation, _Open)]
        settled = [operation.row for operation in batch if isinstance(operation, _Settle)]
        self._begin()
        try:
            plain = bulk.insert(self._connection, opened, self._incarnation)
            plain = plain and bulk.settle(self._connection, settled)
        except _BAD_CONTENTS:
            plain = False
        if not plain:
            self._rollback()
            return None
        self._connection.execute("COMMIT")
        return [None if isinstance(operation, _Open) else True for operation in batch]

    def _apply_each(self, batch: list[_Open | _Settle]) -> list[Result]:
        self._begin()
        results = [self._apply(operation) for operation in batch]
        self._connection.execute("COMMIT")
        return results

    def _begin(self) -> None:
        """Take the write lock, for which other processes compete.

        SQLite's own busy handler backs off to 100 ms between tries and starves beside a busy process, so
        the connection has none: this one asks again after a fraction of a usual transaction.
        """
        deadline = time.monotonic() + self._busy_timeout_s
        while True:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
                if not busy or time.monotonic() >= deadline:
                    raise
                time.sleep(CONTENTION_PAUSE_S)
            else:
                return

    def _take_batch(self) -> list[_Open | _Settle]:
        batch: list[_Open | _Settle] = []
        while self._backlog and len(batch) < MAX_BATCH:
            operation = self._backlog[0]
            if isinstance(operation, _Call):
                break
            batch.append(operation)
            self._backlog.popleft()
        return batch

    def _apply(self, operation: _Open | _Settle) -> Result:
        """Carry one operation out. Bad contents are its own result; other errors end the transaction."""
        try:
            if isinstance(operation, _Open):
                result = self._insert(operation.row)
            else:
                result = self._settle(operation.row)
        except _BAD_CONTENTS as error:
            result = InvalidRow(f"attempt {operation.row.attempt_id}: {type(error).__name__}: {error}")
            result.__cause__ = error
        if isinstance(result, LedgerError):
            log.error("%s: %s", type(result).__name__, result)
        return result

    def _insert(self, row: AttemptOpened) -> Result:
        values = opened_values(row)
        if self._connection.execute(INSERT, (*values, self._incarnation)).rowcount:
            return None
        if self._connection.execute(_EXISTING, (row.attempt_id,)).fetchone() == values:
            return None
        return AttemptConflict(f"attempt {row.attempt_id} was opened before with other contents")

    def _settle(self, row: AttemptSettled) -> Result:
        refused = self._refused.get(row.attempt_id)
        if refused is not None:
            self._insert(refused)
        if self._connection.execute(SETTLE, (*settled_values(row), row.attempt_id)).rowcount:
            return True
        if self._connection.execute(_EXISTING, (row.attempt_id,)).fetchone():
            return False
        return UnknownAttempt(f"attempt {row.attempt_id} was never opened")

    def _succeed(self, batch: list[_Open | _Settle], results: list[Result]) -> None:
        if self._consecutive_failures:
            log.warning("the ledger accepts writes again after %d failures", self._consecutive_failures)
            self._consecutive_failures = 0
        if self._refused:
            for operation in batch:
                self._refused.pop(operation.row.attempt_id, None)
        self._resolve(list(zip((operation.future for operation in batch), results, strict=True)))

    def _fail(self, batch: list[_Open | _Settle], error: Exception) -> None:
        """Refuse every waiting opening and call; keep every settlement, in order."""
        self._count_failure(error)
        self._rollback()
        waiting: list[_Operation] = [*batch, *self._backlog]
        self._backlog = deque(operation for operation in waiting if isinstance(operation, _Settle))
        refused = [operation for operation in waiting if isinstance(operation, _Open)]
        for operation in refused:
            self._refused[operation.row.attempt_id] = operation.row
        while len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]
        for call in waiting:
            if isinstance(call, _Call):
                call.future.set_exception(unavailable(error))
        self._resolve([(operation.future, unavailable(error)) for operation in refused])

    def _count_failure(self, error: Exception) -> None:
        self.failures += 1
        self._consecutive_failures += 1
        if self._consecutive_failures == 1:
            log.error("the ledger refuses writes: %s: %s", type(error).__name__, error)

    def _rollback(self) -> None:
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error:
            log.exception("the ledger could not roll a transaction back")

    def _run_call(self, call: _Call) -> None:
        if not call.future.set_running_or_notify_cancel():
            return
        try:
            self._begin()
            result = call.function(self._connection)
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            self._rollback()
            call.future.set_exception(unavailable(error))
        except Exception as error:  # noqa: BLE001  # handed to the caller, whose function it is
            self._rollback()
            call.future.set_exception(error)
        else:
            call.future.set_result(result)

    def _spill_backlog(self) -> None:
        """Keep the settlements that the last commit before the end did not take."""
        kept = [operation for operation in self._backlog if isinstance(operation, _Settle)]
        self._backlog.clear()
        rows = [Spilled(operation.row, self._refused.get(operation.row.attempt_id)) for operation in kept]
        try:
            self._spill(rows)
        except OSError as error:
            self.error = error
            log.critical("%d settlements are lost: the spill file did not take them either", len(rows))
        else:
            log.error("%d settlements wait in the spill file for the next start", len(rows))
        reason = "not in the ledger when it was closed"
        self._resolve([(operation.future, LedgerUnavailable(reason)) for operation in kept])

    def _resolve(self, results: list[tuple[Waiting, Result]]) -> None:
        """Hand results to the event loop in one call."""
        self._done += len(results)
        if not results:
            return
        try:
            results[0][0].get_loop().call_soon_threadsafe(deliver, results)
        except RuntimeError:  # the loop has ended, and with it whoever waited
            log.warning("%d ledger results had no event loop left to go to", len(results))


def _settled_before_opened(batch: list[_Open | _Settle]) -> bool:
    """Whether a settlement was queued before the opening of its attempt, which is its caller's defect."""
    settled: set[str] = set()
    for operation in batch:
        if isinstance(operation, _Settle):
            settled.add(operation.row.attempt_id)
        elif operation.row.attempt_id in settled:
            return True
    return False
