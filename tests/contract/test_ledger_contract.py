"""What every ledger store must do."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from ctxgate.gateway.ledger import (
    AttemptConflict,
    LedgerClosed,
    Outcome,
    ReportRow,
    UnknownAttempt,
)
from ctxgate.gateway.miss import Miss, MissCause
from ctxgate.inference.usage import NOTHING_KNOWN, UNKNOWN, Usage, estimated, measured
from support.ledgers import NOON_US, cost, opened, settled, write

if TYPE_CHECKING:
    from collections.abc import Callable

    from ctxgate.gateway.ledger import Ledger


async def test_a_settled_attempt_is_reported(ledger: Ledger) -> None:
    await ledger.open(opened())
    assert await ledger.report("task") == []
    assert await ledger.settle(settled()) is True
    assert await ledger.report("task") == [
        ReportRow(
            group="fix-bug",
            requests=1,
            attempts=1,
            cached_tokens=80,
            uncached_tokens=20,
            output_tokens=7,
            reasoning_tokens=0,
            cost_nano=42,
            estimated=0,
            unknown_tokens=0,
            unknown_cost=0,
            organisation="acme",
            team="search",
            key_id="key-1",
        )
    ]


async def test_settling_does_not_wait_for_the_opening(ledger: Ledger) -> None:
    opening, settlement = ledger.open(opened()), ledger.settle(settled())
    assert await settlement is True
    assert opening.done()


async def test_a_second_settlement_changes_nothing(ledger: Ledger) -> None:
    await write(ledger, (opened(), settled()))
    assert await ledger.settle(settled(outcome=Outcome.FAILED, charge=cost(1_000))) is False
    [attempt] = (await ledger.rows()).attempts
    assert attempt.settled == settled()


async def test_duplicate_settlements_in_one_batch_count_once(ledger: Ledger) -> None:
    ledger.open(opened())
    results = await asyncio.gather(*(ledger.settle(settled()) for _ in range(50)))
    assert results == [True] + [False] * 49
    [row] = await ledger.report("team")
    assert (row.attempts, row.cost_nano) == (1, 42)


async def test_opening_twice_is_one_row(ledger: Ledger) -> None:
    await asyncio.gather(ledger.open(opened()), ledger.open(opened()))
    await ledger.settle(settled())
    await ledger.open(opened())
    assert [attempt.settled for attempt in (await ledger.rows()).attempts] == [settled()]


async def test_an_id_cannot_be_opened_with_other_contents(ledger: Ledger) -> None:
    await ledger.open(opened())
    with pytest.raises(AttemptConflict, match="a1"):
        await ledger.open(opened(task="another"))


async def test_settling_an_unknown_attempt_is_an_error_of_that_settlement_only(ledger: Ledger) -> None:
    good, bad, last = ledger.open(opened()), ledger.settle(settled("a2")), ledger.settle(settled())
    assert await last is True
    await good
    with pytest.raises(UnknownAttempt, match="a2"):
        await bad


async def test_every_field_comes_back(ledger: Ledger) -> None:
    before = opened(
        "a-ü",
        attempt_number=3,
        task="naïve'; DROP TABLE attempts; --",
        stream=False,
        predicted_cached_tokens=None,
        estimated_prompt_tokens=None,
    )
    after = settled(
        "a-ü",
        outcome=Outcome.TRUNCATED,
        status=None,
        finish_reason=None,
        ttft_us=None,
        usage=Usage(UNKNOWN, UNKNOWN, estimated(5), measured(2), UNKNOWN, measured(900)),
        charge=cost(None),
    )
    await write(ledger, (before, after), (opened(), settled()))
    first, second = (await ledger.rows()).attempts
    assert (first.opened, first.settled) == (before, after)
    assert (second.opened, second.settled) == (opened(), settled())


async def test_a_ledger_that_takes_writes_is_healthy(ledger: Ledger) -> None:
    await write(ledger, (opened(), settled()))
    assert (ledger.healthy, ledger.problem) == (True, None)


@pytest.mark.parametrize("newest_first", [False, True])
async def test_pages_hold_every_row_once_in_order(ledger: Ledger, newest_first: bool) -> None:
    times = [5, 3, 3, 9, 1, 3, 7]
    rows = [(opened(f"a{i}", opened_at_us=NOON_US + at), settled(f"a{i}")) for i, at in enumerate(times)]
    await write(ledger, *rows)
    await ledger.open(opened("open", opened_at_us=NOON_US))
    ids, cursor, pages = [], None, 0
    while True:
        page = await ledger.rows(limit=2, cursor=cursor, newest_first=newest_first)
        ids += [attempt.opened.attempt_id for attempt in page.attempts]
        pages += 1
        cursor = page.cursor
        if cursor is None:
            break
    expected = ["a4", "a1", "a2", "a5", "a0", "a6", "a3"]
    assert ids == (expected[::-1] if newest_first else expected)
    assert pages == 4


async def test_a_page_needs_a_row(ledger: Ledger) -> None:
    with pytest.raises(ValueError, match="at least one row"):
        await ledger.rows(limit=0)


async def test_gateways_c3_a_cancelled_wait_does_not_undo_the_settlement(ledger: Ledger) -> None:
    ledger.open(opened()).cancel()
    ledger.settle(settled()).cancel()
    assert await ledger.settle(settled()) is False
    [row] = await ledger.report("task")
    assert row.cost_nano == 42


async def test_closing_writes_what_is_queued(open_ledger: Callable[[], Ledger]) -> None:
    ledger = open_ledger()
    futures = [ledger.open(opened(f"a{i}")) for i in range(3_000)]
    settlements = [ledger.settle(settled(f"a{i}")) for i in range(3_000)]
    await ledger.close()
    await asyncio.gather(*futures)
    assert await asyncio.gather(*settlements) == [True] * 3_000
    again = open_ledger()
    [row] = await again.report("task")
    await again.close()
    assert (row.attempts, row.cost_nano) == (3_000, 126_000)


async def test_a_closed_ledger_refuses(open_ledger: Callable[[], Ledger]) -> None:
    ledger = open_ledger()
    await ledger.close()
    await ledger.close()
    with pytest.raises(LedgerClosed):
        ledger.open(opened())
    with pytest.raises(LedgerClosed):
        ledger.settle(settled())
    with pytest.raises(LedgerClosed):
        await ledger.report("task")
    with pytest.raises(LedgerClosed):
        await ledger.rows()
    with pytest.raises(LedgerClosed):
        await ledger.recover()


async def test_api_b22_what_a_stopped_process_left_open_is_settled_as_crashed(
    open_ledger: Callable[[], Ledger],
) -> None:
    first = open_ledger()
    await write(first, (opened("a1"), settled("a1")))
    await first.open(opened("a2"))
    await first.open(opened("a3", estimated_prompt_tokens=None, predicted_cached_tokens=None))
    await first.open(opened("a4", predicted_cached_tokens=None))
    await first.close()
    second = open_ledger()
    assert sorted(await second.recover()) == ["a2", "a3", "a4"]
    assert list(await second.recover()) == []
    rows = {row.opened.attempt_id: row.settled for row in (await second.rows()).attempts}
    [total] = await second.report("team")
    await second.close()
    assert rows.pop("a1") == settled("a1")
    assert {row.outcome for row in rows.values()} == {Outcome.CRASHED}
    assert rows["a2"].usage == Usage(estimated(20), estimated(80), UNKNOWN)
    assert rows["a2"].charge.total == 28
    assert rows["a3"].usage == NOTHING_KNOWN
    assert rows["a3"].charge.total is None
    assert rows["a4"].usage == Usage(estimated(100), estimated(0), UNKNOWN)
    assert rows["a4"].charge.total == 100
    assert (total.attempts, total.cost_nano, total.unknown_cost, total.estimated) == (4, 170, 3, 2)


async def test_recovery_leaves_living_processes_alone(open_ledger: Callable[[], Ledger]) -> None:
    first, second = open_ledger(), open_ledger()
    await first.open(opened("a1"))
    await second.open(opened("a2"))
    assert list(await second.recover()) == []
    assert [await first.settle(settled("a1")), await second.settle(settled("a2"))] == [True, True]
    assert [row.attempts for row in await first.report("task")] == [2]
    for one in (first, second):
        await one.close()


async def test_an_attempt_may_be_settled_through_another_process(open_ledger: Callable[[], Ledger]) -> None:
    first, second = open_ledger(), open_ledger()
    await first.open(opened())  # durable, so the other process sees it
    assert await second.settle(settled()) is True
    assert await first.settle(settled(outcome=Outcome.FAILED)) is False
    for one in (first, second):
        await one.close()


MISSES = [
    Miss(MissCause.NOT_REPORTED),
    Miss(MissCause.EVICTED, avoidable_tokens=0, avoidable_nano=0),
    Miss(MissCause.SYSTEM_CHANGED, "volatile_in_head/clock", "messages[0].content", 0, 54, 4_096, 3_686_400),
    Miss(MissCause.MOVED_REPLICA, "fast/fast-1", avoidable_tokens=992),
    Miss(MissCause.HISTORY_EDITED, "history_edited", "messages[7]", 7, None, 5, -3),
]


async def test_why_the_cache_was_missed_comes_back(ledger: Ledger) -> None:
    rows = [(opened(f"a{at}"), settled(f"a{at}", miss=miss)) for at, miss in enumerate(MISSES)]
    await write(ledger, *rows)
    assert [attempt.settled for attempt in (await ledger.rows()).attempts] == [after for _, after in rows]
