"""The ledger under any order of openings, settlements, failures and restarts, against a plain model."""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxgate.gateway.ledger import AttemptSettled, LedgerUnavailable, Outcome, UnknownAttempt
from ctxgate.gateway.stores.rows import settled_from_values, settled_values
from ctxgate.gateway.stores.sqlite import SqliteLedger
from ctxgate.inference.rates import Charge
from ctxgate.inference.usage import UNKNOWN, Usage, estimated, measured
from support.ledgers import NOON_US, cost, opened, price, settled

if TYPE_CHECKING:
    from asyncio import Future

    from ctxgate.gateway.ledger import Attempt

pytestmark = pytest.mark.integration

IDS = [f"a{number}" for number in range(6)]
steps = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.sampled_from(IDS), st.just(0)),
        st.tuples(st.just("settle"), st.sampled_from(IDS), st.integers(1, 9)),
        st.sampled_from([("wait", "", 0), ("restart", "", 0), ("recover", "", 0)]),
        st.sampled_from([("lock", "", 0), ("unlock", "", 0)]),
    ),
    max_size=40,
)


@dataclass
class Model:
    """What must be in the ledger: the amount of each settlement, None for an open attempt."""

    rows: dict[str, int | None] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    expected: list[tuple[Future[bool], bool | type[Exception]]] = field(default_factory=list)


@dataclass
class World:
    """One database, the present ledger on it, and another process that may lock it."""

    path: Path
    ledger: SqliteLedger
    model: Model
    locker: sqlite3.Connection

    async def step(self, verb: str, name: str, amount: int) -> None:
        if verb == "open":
            await self.open(name)
        elif verb == "settle":
            self.settle(name, amount)
        elif verb == "lock" and not self.locker.in_transaction:
            await self.check()  # what came before the lock is written before it
            self.locker.execute("BEGIN IMMEDIATE")
        elif verb == "wait":
            await self.check()
        elif verb == "unlock":
            self.unlock()
        elif verb == "restart":
            await self.restart()
        elif verb == "recover":
            self.unlock()
            assert await self.ledger.recover() == []  # this process lives

    async def open(self, name: str) -> None:
        if not self.locker.in_transaction:
            await self.ledger.open(opened(name))
            self.model.rows.setdefault(name, None)
            self.model.refused.discard(name)
            return
        try:
            await self.ledger.open(opened(name))
        except LedgerUnavailable:
            self.model.refused.add(name)
        else:
            raise AssertionError("an opening went through a lock")

    def settle(self, name: str, amount: int) -> None:
        unknown = name not in self.model.rows and name not in self.model.refused
        if unknown and self.locker.in_transaction:
            return  # whether an opening comes before the lock ends decides about it
        future = self.ledger.settle(settled(name, charge=cost(amount)))
        result: bool | type[Exception] = False
        if unknown:
            result = UnknownAttempt
        elif self.model.rows.get(name) is None:
            self.model.rows[name] = amount
            result = True
        self.model.refused.discard(name)
        self.model.expected.append((future, result))

    async def check(self) -> None:
        self.unlock()
        for future, result in self.model.expected:
            if isinstance(result, bool):
                assert await future is result
            else:
                assert isinstance((await asyncio.gather(future, return_exceptions=True))[0], result)
        self.model.expected.clear()

    def unlock(self) -> None:
        if self.locker.in_transaction:
            self.locker.execute("ROLLBACK")

    async def restart(self) -> None:
        """Stop, possibly while locked, so that settlements are spilled; start; recover."""
        await self.ledger.close()
        self.unlock()
        await asyncio.gather(*(future for future, _ in self.model.expected), return_exceptions=True)
        self.model.expected.clear()
        self.model.refused.clear()
        self.ledger = start(self.path)
        left = [name for name, amount in self.model.rows.items() if amount is None]
        assert sorted(await self.ledger.recover()) == sorted(left)
        self.model.rows.update(dict.fromkeys(left, 28))  # 20 uncached and 80 / 10 cached tokens


def start(path: Path) -> SqliteLedger:
    return SqliteLedger(path, price=price, busy_timeout_s=0, retry_delays_s=(0.0005,))


async def live(todo: list[tuple[str, str, int]], path: Path) -> tuple[Model, list[Attempt], int]:
    ledger = start(path)
    locker = sqlite3.connect(path, isolation_level=None)
    world = World(path, ledger, Model(), locker)
    try:
        for step in todo:
            await world.step(*step)
        await world.check()
        attempts = list((await world.ledger.rows(limit=100)).attempts)
        booked = sum(row.cost_nano for row in await world.ledger.report("day"))
    finally:
        world.unlock()
        locker.close()
        await world.ledger.close()
    return world.model, attempts, booked


@settings(max_examples=40, deadline=None)
@given(steps)
def test_api_b2_every_settlement_counts_once_in_any_interleaving(todo: list[tuple[str, str, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model, attempts, booked = asyncio.run(live(todo, Path(folder) / "ledger.db"))
    found = {attempt.opened.attempt_id: attempt.settled.charge.total for attempt in attempts}
    assert len(found) == len(attempts)
    expected = {name: amount for name, amount in model.rows.items() if amount is not None}
    assert found == expected
    assert booked == sum(expected.values())


counts = st.one_of(
    st.just(UNKNOWN), st.builds(measured, st.integers(0, 2**62)), st.builds(estimated, st.integers(0, 2**62))
)
amounts = st.one_of(st.none(), st.integers(0, 2**62))


# Not the types themselves: their annotations do not exist at run time, and would be looked up.
def a_settlement(**fields: Any) -> AttemptSettled:
    return AttemptSettled(**fields)


def a_charge(**fields: Any) -> Charge:
    return Charge(**fields)


settlements = st.builds(
    a_settlement,
    attempt_id=st.just("a1"),
    outcome=st.sampled_from(Outcome),
    status=st.one_of(st.none(), st.integers(100, 599)),
    finish_reason=st.one_of(st.none(), st.text()),
    ttft_us=amounts,
    total_us=st.integers(0, 2**62),
    settled_at_us=st.integers(0, 2**62),
    usage=st.builds(Usage, uncached=counts, cached=counts, output=counts, prompt_total=counts),
    charge=st.builds(
        a_charge,
        uncached=amounts,
        cached=amounts,
        output=amounts,
        total=amounts,
        exact=st.booleans(),
        rates_effective=st.dates(),
    ),
)


@given(settlements)
def test_a_settlement_survives_its_columns(row: AttemptSettled) -> None:
    assert settled_from_values("a1", settled_values(row)) == row


@dataclass
class Sums:
    requests: set[str] = field(default_factory=set)
    attempts: int = 0
    nano: int = 0
    unknown: int = 0


attempts_of_a_day = st.lists(
    st.tuples(
        st.sampled_from(["t1", "t2", "t3"]),
        st.integers(0, 3),  # which request
        st.integers(-2 * 86_400, 2 * 86_400),  # seconds from noon
        st.one_of(st.none(), st.integers(0, 2**50)),
    ),
    max_size=25,
)


async def book(
    rows: list[tuple[str, int, int, int | None]], path: Path
) -> list[list[tuple[str, int, int, int, int]]]:
    ledger = SqliteLedger(path, price=price)
    written: list[Future[None] | Future[bool]] = []
    for number, (task, request, seconds, nano) in enumerate(rows):
        row = opened(
            f"a{number}", task=task, request_id=f"r{request}", opened_at_us=NOON_US + seconds * 1_000_000
        )
        written += [ledger.open(row), ledger.settle(settled(f"a{number}", charge=cost(nano)))]
    await asyncio.gather(*written)
    reports = []
    for by in ("task", "day"):
        report = await ledger.report(by)
        reports.append([(r.group, r.requests, r.attempts, r.cost_nano, r.unknown_cost) for r in report])
    await ledger.close()
    return reports


def day_of(seconds: int) -> str:
    """The UTC day so many seconds from noon of 2026-11-30, by ordinals."""
    return date.fromordinal(date(2026, 11, 30).toordinal() + (seconds + 43_200) // 86_400).isoformat()


@settings(max_examples=30, deadline=None)
@given(attempts_of_a_day)
def test_a_report_equals_sums_made_by_hand(rows: list[tuple[str, int, int, int | None]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        by_task, by_day = asyncio.run(book(rows, Path(folder) / "ledger.db"))
    for report, key in ((by_task, lambda row: row[0]), (by_day, lambda row: day_of(row[2]))):
        sums: dict[str, Sums] = defaultdict(Sums)
        for row in rows:
            group = sums[key(row)]
            group.requests.add(f"r{row[1]}")
            group.attempts += 1
            group.nano += row[3] or 0
            group.unknown += row[3] is None
        expected = [
            (name, len(s.requests), s.attempts, s.nano, s.unknown) for name, s in sorted(sums.items())
        ]
        assert report == expected
