"""What every ledger store must do."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from ctxgate.gateway.ledger import (
    EVERYTHING,
    AttemptConflict,
    LedgerClosed,
    Outcome,
    ReportRow,
    UnknownAttempt,
)
from ctxgate.inference.usage import NOTHING_KNOWN, NOTHING_USED, UNKNOWN, Usage, estimated, measured
from support.ledgers import DAY_US, NOON_US, STORES, cost, opened, settled

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from ctxgate.gateway.ledger import AttemptOpened, AttemptSettled, Ledger


@pytest.fixture(params=STORES)
def open_ledger(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Ledger]:
    """Open one more ledger on the same store."""
    store = STORES[request.param]
    return lambda: store(tmp_path)


@pytest.fixture
async def ledger(open_ledger: Callable[[], Ledger]) -> AsyncIterator[Ledger]:
    yield (ledger := open_ledger())
    await ledger.close()


async def write(ledger: Ledger, *rows: tuple[AttemptOpened, AttemptSettled]) -> None:
    futures = [step for before, after in rows for step in (ledger.open(before), ledger.settle(after))]
    assert await asyncio.gather(*futures) == [None, True] * len(rows)


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


GROUPED = {
    "task": [("fix-bug", 2, 3, 126), ("write-docs", 1, 1, 42)],
    "team": [("ads", 1, 1, 42), ("search", 2, 3, 126)],
    "pool": [("fast", 2, 2, 84), ("standard", 2, 2, 84)],
    "model": [("large", 1, 1, 42), ("small", 2, 3, 126)],
    "day": [("2026-11-30", 2, 3, 126), ("2026-12-01", 1, 1, 42)],
    EVERYTHING: [("total", 3, 4, 168)],
}


async def spread(ledger: Ledger) -> None:
    """Three requests of two teams; the first needed two attempts, in two pools."""
    await write(
        ledger,
        (opened("a1"), settled("a1")),
        (opened("a2", request_id="request-a1", attempt_number=2, pool="standard"), settled("a2")),
        (opened("a3"), settled("a3")),
        (
            opened(
                "a4",
                team="ads",
                task="write-docs",
                key_id="key-2",
                model="large",
                pool="standard",
                opened_at_us=NOON_US + DAY_US,
            ),
            settled("a4"),
        ),
    )


@pytest.mark.parametrize("by", GROUPED)
async def test_api_b28_report_counts_requests_and_attempts_apart(ledger: Ledger, by: str) -> None:
    await spread(ledger)
    rows = await ledger.report(by)
    assert [(row.group, row.requests, row.attempts, row.cost_nano) for row in rows] == GROUPED[by]


@pytest.mark.parametrize(
    ("where", "attempts"),
    [
        ({"organisation": "acme"}, 4),
        ({"organisation": "other"}, 0),
        ({"team": "search"}, 3),
        ({"key_id": "key-2"}, 1),
        ({"task": "write-docs"}, 1),
        ({"pool": "standard"}, 2),
        ({"model": "small"}, 3),
        ({"team": "search", "pool": "standard"}, 1),
        ({"team": "' OR 1 = 1 --"}, 0),
    ],
)
async def test_report_and_rows_narrow_alike(ledger: Ledger, where: dict[str, str], attempts: int) -> None:
    await spread(ledger)
    assert sum(row.attempts for row in await ledger.report("day", where=where)) == attempts
    assert len((await ledger.rows(where=where)).attempts) == attempts


async def test_the_span_takes_its_start_and_leaves_its_end(ledger: Ledger) -> None:
    await spread(ledger)
    [row] = await ledger.report("day", since_us=NOON_US + 1)
    assert (row.group, row.attempts) == ("2026-12-01", 1)
    [row] = await ledger.report("day", since_us=NOON_US, until_us=NOON_US + DAY_US)
    assert (row.group, row.attempts) == ("2026-11-30", 3)
    page = await ledger.rows(since_us=NOON_US, until_us=NOON_US + DAY_US)
    assert len(page.attempts) == 3


async def test_a_span_of_the_far_future_is_empty(ledger: Ledger) -> None:
    await spread(ledger)
    assert await ledger.report("day", since_us=10**30) == []
    assert len(await ledger.report("day", until_us=10**30)) == 2


async def test_an_attempt_across_midnight_lies_in_the_day_it_was_opened(ledger: Ledger) -> None:
    last = NOON_US + DAY_US // 2 - 1
    await write(
        ledger,
        (opened("a1", opened_at_us=last), settled("a1", settled_at_us=last + 5_000_000)),
        (opened("a2", opened_at_us=last + 1), settled("a2", settled_at_us=last + 2)),
    )
    days = [(row.group, row.attempts) for row in await ledger.report("day")]
    assert days == [("2026-11-30", 1), ("2026-12-01", 1)]


@pytest.mark.parametrize("by", ["", "replica", "task; DROP TABLE attempts", "TASK"])
async def test_an_unknown_grouping_is_refused(ledger: Ledger, by: str) -> None:
    with pytest.raises(ValueError, match="cannot group by"):
        await ledger.report(by)


@pytest.mark.parametrize("column", ["", "replica", "1 = 1 OR team", "Team"])
async def test_an_unknown_filter_is_refused(ledger: Ledger, column: str) -> None:
    with pytest.raises(ValueError, match="cannot filter by"):
        await ledger.report("task", where={column: "x"})
    with pytest.raises(ValueError, match="cannot filter by"):
        await ledger.rows(where={column: "x"})


async def test_equal_names_of_two_tenants_are_two_groups(ledger: Ledger) -> None:
    await write(
        ledger,
        (opened("a1"), settled("a1")),
        (opened("a2", organisation="globex"), settled("a2")),
        (opened("a3", task="other"), settled("a3")),
    )
    tasks = [(row.group, row.attempts) for row in await ledger.report("task")]
    assert tasks == [("acme/search/key-1/fix-bug", 1), ("globex/search/key-1/fix-bug", 1), ("other", 1)]
    teams = [(row.group, row.attempts) for row in await ledger.report("team")]
    assert teams == [("acme/search", 2), ("globex/search", 1)]


async def test_api_b13_zero_is_a_value_and_unknown_is_none(ledger: Ledger) -> None:
    await write(
        ledger,
        (opened("a1"), settled("a1", usage=NOTHING_USED, charge=cost(0))),
        (opened("a2"), settled("a2", usage=NOTHING_KNOWN, charge=cost(None))),
        (opened("a3"), settled("a3")),
    )
    [row] = await ledger.report("task")
    assert (row.cached_tokens, row.uncached_tokens, row.output_tokens, row.cost_nano) == (80, 20, 7, 42)
    assert (row.unknown_tokens, row.unknown_cost, row.estimated) == (1, 1, 0)


async def test_partly_known_attempts_add_what_is_known_and_are_counted(ledger: Ledger) -> None:
    half = Usage(UNKNOWN, UNKNOWN, measured(30), measured(10), UNKNOWN, measured(500))
    await write(ledger, (opened("a1"), settled("a1", usage=half)), (opened("a2"), settled("a2")))
    [row] = await ledger.report("task")
    assert (row.output_tokens, row.reasoning_tokens, row.cached_tokens, row.unknown_tokens) == (37, 10, 80, 1)


@pytest.mark.parametrize("place", ["uncached", "cached", "output", "reasoning"])
async def test_api_b12_estimates_are_counted_once_per_attempt(ledger: Ledger, place: str) -> None:
    counts = {name: measured(9) for name in ("uncached", "cached", "output", "reasoning")}
    usage = Usage(**{**counts, place: estimated(9)})
    two = Usage(estimated(1), estimated(1), estimated(1))
    await write(
        ledger,
        (opened("a1"), settled("a1", usage=usage)),
        (opened("a2"), settled("a2", usage=two)),
        (opened("a3"), settled("a3")),
    )
    [row] = await ledger.report("task")
    assert row.estimated == 2


async def test_api_b19_many_cheap_requests_sum_exactly(ledger: Ledger) -> None:
    """2,500 calls of 0.004 USD are 10 USD, and each further nano-dollar shows."""
    rows = [(opened(f"a{i}"), settled(f"a{i}", charge=cost(4_000_000))) for i in range(2_500)]
    await write(ledger, *rows, (opened("b"), settled("b", charge=cost(1))))
    [row] = await ledger.report("team")
    assert row.cost_nano == 10_000_000_001


async def test_sums_beyond_the_exact_integers_of_a_float(ledger: Ledger) -> None:
    large = 2**53
    rows = [(opened(f"a{i}"), settled(f"a{i}", charge=cost(large + 1))) for i in range(3)]
    await write(ledger, *rows)
    [row] = await ledger.report("pool")
    assert row.cost_nano == 27_021_597_764_222_979


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
