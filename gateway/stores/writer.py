"""The ledger's writer: one thread, one connection, many queued operations per transaction.

While a commit runs, further operations queue up and share the next one (group commit), so the load
itself sets the size of a transaction and an idle writer commits at once; a function that joins runs
among them. An operation of bad contents
fails alone; a transaction that fails refuses its openings and keeps its settlements for the next try,
in memory first and past a bound in the spill file.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
import time
from collections import deque
from concurrent.futures import Future as ThreadFuture
from itertools import islice
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final, TypeVar

from ctxgate.gateway.ledger import LedgerUnavailable
from ctxgate.gateway.stores.operations import Batched, Call, Join, Open, Operation, Settle, Stop
from ctxgate.gateway.stores.results import Result, Waiting, deliver, unavailable
from ctxgate.gateway.stores.spill import Spilled, SpillFailed
from ctxgate.gateway.stores.transactions import touch

if TYPE_CHECKING:
    from collections.abc import Callable

    from ctxgate.gateway.ledger import AttemptOpened, AttemptSettled
    from ctxgate.gateway.stores.overflow import Overflow
    from ctxgate.gateway.stores.transactions import Transactions

log = logging.getLogger(__name__)

T = TypeVar("T")

GATHER_FROM: Final = 8  # open attempts
GATHER_S: Final = 0.002
GATHER_LONGER_FROM: Final = 24
GATHER_LONGER_S: Final = 0.005
MAX_BATCH: Final = 1_000  # operations per transaction; bounds how long others wait for the write lock
MAX_KEPT: Final = 10_000  # settlements kept in memory while the store refuses them
MAX_REFUSED: Final = 65_536  # refused openings kept for a settlement that may still come
RETRY_DELAYS_S: Final = (0.01, 0.03, 0.1, 0.3, 1.0)  # the last one repeats


class Writer:
    """Applies queued openings and settlements. `open`, `settle` and `stop` belong to one event loop."""

    def __init__(
        self,
        transactions: Transactions,
        *,
        committed: Callable[[int], None],
        overflow: Overflow,
        retry_delays_s: tuple[float, ...] = RETRY_DELAYS_S,
    ) -> None:
        self._transactions = transactions
        self._committed = committed
        self._overflow = overflow
        self._retry_delays_s = retry_delays_s
        self._queue: SimpleQueue[tuple[Operation | Stop, ...]] = SimpleQueue()
        self._staged: list[Batched] = []
        self._backlog: deque[Operation] = deque()
        self._refused: dict[str, AttemptOpened] = {}
        self._dropped = 0  # refused openings, in this outage
        self._spill_at = MAX_KEPT
        self._stopping = False
        self._consecutive_failures = 0
        self._open_attempts = 0  # those of this process; what a crash left open does not count
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

    @property
    def failing(self) -> bool:
        """Whether the last transaction was refused."""
        return self._consecutive_failures > 0

    def open(self, row: AttemptOpened, future: asyncio.Future[None]) -> None:
        """Queue an opening row."""
        self._open_attempts += 1
        self._stage(Open(row, future))

    def settle(self, row: AttemptSettled, future: asyncio.Future[bool]) -> None:
        """Queue a settlement."""
        self._open_attempts -= 1
        self._stage(Settle(row, future))

    def join(
        self, function: Callable[[sqlite3.Connection], dict[bytes, bytes]]
    ) -> asyncio.Future[dict[bytes, bytes]]:
        """Run a function in the next transaction, beside its rows, which are handed over with it now.

        For the event loop. What the function raises undoes its own work alone; LedgerUnavailable where
        the store did not take it.
        """
        future: asyncio.Future[dict[bytes, bytes]] = asyncio.get_running_loop().create_future()
        self._queued += 1
        self._staged.append(Join(function, future))
        self._hand_over()
        return future

    def _stage(self, operation: Open | Settle) -> None:
        """Hand an operation over: at once to an idle writer, else with what else comes meanwhile.

        Waking the thread costs more than writing a row, and more than that beside a busy event loop. While
        many attempts are open, operations are therefore gathered for a moment, which none of them notices:
        an answer that takes seconds waits for its last bytes as long as its engine takes for one token.
        """
        idle = not self.pending
        self._queued += 1
        many = self._open_attempts >= GATHER_FROM
        if idle and not many:
            self._queue.put((operation,))
            return
        if not self._staged:
            loop = operation.future.get_loop()
            if many:
                longer = self._open_attempts >= GATHER_LONGER_FROM
                loop.call_later(GATHER_LONGER_S if longer else GATHER_S, self._hand_over)
            else:
                loop.call_soon(self._hand_over)
        self._staged.append(operation)

    def _hand_over(self) -> None:
        if self._staged:
            self._queue.put(tuple(self._staged))
            self._staged.clear()

    def call(self, function: Callable[[sqlite3.Connection], T]) -> ThreadFuture[T]:
        """Run a function in a transaction of its own, after what was handed over. From any thread."""
        future: ThreadFuture[T] = ThreadFuture()
        self._queue.put((Call(function, future),))  # type: ignore[arg-type]  # the future gets the function's T
        return future

    def flush(self) -> None:
        """Hand over what is staged now; for the event loop's thread, before a `stop` on another one."""
        self._hand_over()

    def stop(self) -> None:
        """Write or spill what was handed over and end the thread. Blocks; `error` says if a spill failed."""
        self._queue.put((Stop(),))
        self._thread.join()

    def _run(self) -> None:
        while self._backlog or not self._stopping:
            self._gather()
            if self._backlog:
                if not self._write_batch() and self._stopping and self._backlog:
                    self._spill_backlog()
            elif self.failing and not self._stopping:
                self._probe()
            if self._overflow.waiting and not self.failing and not self._stopping:
                self._replay()
        self._transactions.close()

    def _gather(self) -> None:
        """Move what is queued to the backlog; wait while there is nothing to do."""
        if self.failing and not self._stopping:
            self._wait_for_retry()
        elif not self._backlog and not self._overflow.waiting:
            self._accept(self._queue.get())
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

    def _accept(self, operations: tuple[Operation | Stop, ...]) -> None:
        for operation in operations:
            if isinstance(operation, Stop):
                self._stopping = True
            else:
                self._backlog.append(operation)

    def _write_batch(self) -> bool:
        """Take the next batch off the backlog and write it; False where the store refused it."""
        first = self._backlog[0]
        if isinstance(first, Call):
            self._backlog.popleft()
            self._run_call(first)
            return True
        batch = self._take_batch()
        try:
            results = self._transactions.write(batch, self._refused)
        except Exception as error:  # noqa: BLE001  # a dead writer hangs every request
            self._fail(batch, error)
            return False
        self._succeed(batch, results)
        self._committed(len(batch))
        return True

    def _take_batch(self) -> list[Batched]:
        batch: list[Batched] = []
        while self._backlog and len(batch) < MAX_BATCH:
            operation = self._backlog[0]
            if isinstance(operation, Call):
                break
            batch.append(operation)
            self._backlog.popleft()
        return batch

    def _succeed(self, batch: list[Batched], results: list[Result]) -> None:
        self._note_success()
        if self._refused:
            for operation in batch:
                if not isinstance(operation, Join):
                    self._refused.pop(operation.row.attempt_id, None)
        self._resolve(list(zip((operation.future for operation in batch), results, strict=True)))

    def _note_success(self) -> None:
        if self._consecutive_failures:
            log.warning(
                "the ledger accepts writes again after %d failures; %d settlements wait in the spill file",
                self._consecutive_failures,
                self._overflow.waiting,
            )
        self._consecutive_failures = 0
        self._dropped = 0
        self._spill_at = MAX_KEPT

    def _fail(self, batch: list[Batched], error: Exception) -> None:
        """Refuse every waiting opening and function; keep every settlement, in order."""
        self._count_failure(error)
        waiting: list[Operation] = [*batch, *self._backlog]
        self._backlog = deque(operation for operation in waiting if isinstance(operation, Settle))
        refused = [operation for operation in waiting if isinstance(operation, Open | Join)]
        for operation in refused:
            if isinstance(operation, Open):
                self._refused[operation.row.attempt_id] = operation.row
        for call in waiting:
            if isinstance(call, Call) and call.future.set_running_or_notify_cancel():
                call.future.set_exception(unavailable(error))
        self._resolve([(operation.future, unavailable(error)) for operation in refused])
        if len(self._backlog) >= self._spill_at:
            self._relieve()
        self._bound_refused()

    def _relieve(self) -> None:
        """Move kept settlements to the spill file: an outage that lasts must not fill the memory."""
        kept = [operation for operation in self._backlog if isinstance(operation, Settle)]
        count, error = self._spill(kept)
        self._backlog = deque(kept[count:])
        for operation in kept[:count]:
            self._refused.pop(operation.row.attempt_id, None)
        self._resolve([(operation.future, True) for operation in kept[:count]])
        if error is not None:
            if self._spill_at == MAX_KEPT:
                log.error("the spill file takes no settlements: %s; they wait in memory", error)
            self._spill_at = 2 * len(self._backlog)

    def _bound_refused(self) -> None:
        surplus = len(self._refused) - MAX_REFUSED
        if surplus <= 0:
            return
        for attempt_id in list(islice(self._refused, surplus)):
            del self._refused[attempt_id]
        if not self._dropped:
            log.critical("more than %d attempts without an end were refused: old ones are lost", MAX_REFUSED)
        self._dropped += surplus

    def _spill(self, kept: list[Settle]) -> tuple[int, SpillFailed | None]:
        """Append settlements to the spill file; returns how many it took, and why not all."""
        try:
            self._overflow.put([Spilled(each.row, self._refused.get(each.row.attempt_id)) for each in kept])
        except SpillFailed as error:
            return error.kept, error
        return len(kept), None

    def _probe(self) -> None:
        """Ask a store that failed whether it works: a gateway that waits for that sends no rows."""
        try:
            self._transactions.run(touch)
        except Exception as error:  # noqa: BLE001  # as in `_write_batch`
            self._count_failure(error)
        else:
            self._note_success()

    def _replay(self) -> None:
        """Write the next rows of the spill file."""
        rows = self._overflow.next_chunk()
        if not rows:
            return
        try:
            missing = self._transactions.replay(rows)
        except Exception as error:  # noqa: BLE001  # as in `_write_batch`
            self._overflow.rewind()
            self._fail([], error)
            return
        self._committed(len(rows))
        if missing:
            log.error("%d spilled settlements of attempts that were never opened", len(missing))

    def _count_failure(self, error: Exception) -> None:
        self.failures += 1
        self._consecutive_failures += 1
        if self._consecutive_failures == 1:
            log.error("the ledger refuses writes: %s: %s", type(error).__name__, error)

    def _run_call(self, call: Call) -> None:
        if not call.future.set_running_or_notify_cancel():
            return
        try:
            result = self._transactions.run(call.function)
        except sqlite3.Error as error:
            call.future.set_exception(unavailable(error))
        except Exception as error:  # noqa: BLE001  # handed to the caller, whose function it is
            call.future.set_exception(error)
        else:
            call.future.set_result(result)

    def _spill_backlog(self) -> None:
        """Keep the settlements that the last commit before the end did not take."""
        kept = [operation for operation in self._backlog if isinstance(operation, Settle)]
        self._backlog.clear()
        count, self.error = self._spill(kept)
        if self._overflow.waiting:
            log.error("%d settlements wait in the spill file for the next start", self._overflow.waiting)
        if self.error is not None:
            lost = len(kept) - count
            log.critical("%d settlements are lost: the spill file did not take them: %s", lost, self.error)
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
