"""What every ledger store must report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.gateway.ledger import EVERYTHING, MissRow, SavingRow
from ctxgate.gateway.miss import Miss, MissCause
from ctxgate.inference.usage import NOTHING_KNOWN, NOTHING_USED, UNKNOWN, Usage, estimated, measured
from support.ledgers import DAY_US, NOON_US, cost, opened, settled, write

if TYPE_CHECKING:
    from ctxgate.gateway.ledger import AttemptOpened, AttemptSettled, Ledger


GROUPED = {
    "task": [("fix-bug", 2, 3, 126), ("write-docs", 1, 1, 42)],
    "team": [("ads", 1, 1, 42), ("search", 2, 3, 126)],
    "pool": [("fast", 2, 2, 84), ("standard", 2, 2, 84)],
    "model": [("large", 1, 1, 42), ("small", 2, 3, 126)],
    "day": [("2026-11-30", 2, 3, 126), ("2026-12-01", 1, 1, 42)],
    "cause": [("no miss", 3, 4, 168)],
    "class": [("batch", 1, 1, 42), ("unknown", 2, 3, 126)],
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
                job_class="batch",
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
        (opened("a3", key_id="key-0"), settled("a3")),
        (opened("a4", task="acme/search/key-1/fix-bug"), settled("a4")),
    )
    tasks = [(row.group, row.organisation, row.team, row.key_id) for row in await ledger.report("task")]
    assert tasks == [
        ("acme/search/key-1/fix-bug", "acme", "search", "key-1"),
        ("fix-bug", "acme", "search", "key-0"),
        ("fix-bug", "acme", "search", "key-1"),
        ("fix-bug", "globex", "search", "key-1"),
    ]
    teams = [(row.group, row.organisation, row.team, row.attempts) for row in await ledger.report("team")]
    assert teams == [("search", "acme", None, 3), ("search", "globex", None, 1)]
    [model] = await ledger.report("model")
    assert (model.organisation, model.team, model.key_id) == (None, None, None)


async def test_a_report_by_cost_comes_in_pages_that_meet(ledger: Ledger) -> None:
    costs = {"t1": 5, "t2": 9, "t3": 5, "t4": 7, "t5": None}
    rows = [
        (opened(f"a-{task}", task=task), settled(f"a-{task}", charge=cost(nano)))
        for task, nano in costs.items()
    ]
    await write(ledger, *rows)
    pages = [await ledger.report("task", dearest_first=True, limit=2, offset=at) for at in (0, 2, 4, 6)]
    names = [[row.group for row in page] for page in pages]
    assert names == [["t2", "t4"], ["t1", "t3"], ["t5"], []]
    assert [row.group for row in await ledger.report("task", limit=3)] == ["t1", "t2", "t3"]
    assert [row.group for row in await ledger.report("task", offset=3)] == ["t4", "t5"]


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


def missed(
    at: int, cause: MissCause, field: str | None, index: int | None, *known: int | None, **changes: str
) -> tuple[AttemptOpened, AttemptSettled]:
    """An attempt that missed `known` tokens and nano-dollars."""
    miss = Miss(cause, None if field is None else "kind", field, index, None, *known)
    return opened(f"a{at}", **changes), settled(f"a{at}", miss=miss)


async def test_misses_are_summed_by_cause_detail_and_field_the_dearest_first(ledger: Ledger) -> None:
    head, edited = MissCause.SYSTEM_CHANGED, MissCause.HISTORY_EDITED
    await write(
        ledger,
        missed(1, head, "messages[0].content", 0, 100, 90),
        missed(2, head, "messages[0].content", 0, 200, 180, request_id="request-a1"),
        missed(3, edited, "messages[3].content", 3, 10, 500),
        missed(4, edited, "messages[12].content", 12, 20, 1_000),
        missed(5, edited, "messages[12].tool_calls[0].function.arguments", 12, 5, None),
        missed(6, MissCause.NOT_REPORTED, None, None, None, None),
        (opened("a7"), settled("a7")),
    )
    assert await ledger.misses() == [
        MissRow(edited, "kind", "messages[].content", 2, 2, 30, 1_500, 0),
        MissRow(head, "kind", "messages[0].content", 1, 2, 300, 270, 0),
        MissRow(edited, "kind", "messages[12].tool_calls[0].function.arguments", 1, 1, 5, 0, 1),
        MissRow(MissCause.NOT_REPORTED, None, None, 1, 1, 0, 0, 1),
    ]
    causes = {row.group: row.attempts for row in await ledger.report("cause")}
    assert causes == {"history_edited": 3, "system_changed": 2, "not_reported": 1, "no miss": 1}


async def test_misses_are_narrowed_like_a_report(ledger: Ledger) -> None:
    cause = MissCause.EXPIRED
    await write(
        ledger,
        missed(1, cause, None, None, 1, 1),
        missed(2, cause, None, None, 2, 2, team="ads"),
        (opened("a3", opened_at_us=NOON_US + DAY_US), missed(3, cause, None, None, 4, 4)[1]),
    )

    async def tokens(**narrowed: Any) -> int:
        return sum(row.avoidable_tokens for row in await ledger.misses(**narrowed))

    assert await tokens() == 7
    assert await tokens(where={"team": "ads"}) == 2
    assert await tokens(since_us=NOON_US + 1) == 4
    assert await tokens(until_us=NOON_US + 1) == 3
    assert await tokens(where={"team": "' OR 1 = 1 --"}) == 0
    with pytest.raises(ValueError, match="cannot filter by"):
        await ledger.misses(where={"miss_cause": "expired"})


async def compacted(ledger: Ledger) -> None:
    """Three requests for 42 each, the second one compacted by a call for 10, the third beyond the window."""
    await write(
        ledger,
        (opened("a1"), settled("a1", plain_nano=42, fixed_nano=40)),
        (opened("s1", request_id="s1", purpose="summary"), settled("s1", charge=cost(10))),
        (opened("a2", client_tokens=900), settled("a2", plain_nano=100, fixed_nano=60)),
        (opened("a3", client_tokens=1100, task="other"), settled("a3", fixed_nano=70)),
    )


async def test_savings_are_what_prompts_would_have_cost_less_all_that_was_paid(ledger: Ledger) -> None:
    await compacted(ledger)
    owner = {"organisation": "acme", "team": "search", "key_id": "key-1"}
    assert await ledger.savings("task") == [
        SavingRow("fix-bug", 2, 1, 800, 1, 10, 94, 142, 100, 0, **owner),
        SavingRow("other", 1, 1, 1000, 0, 0, 42, 42, 70, 0, **owner),
    ]
    [everything] = await ledger.savings(EVERYTHING)
    assert everything == SavingRow(EVERYTHING, 3, 2, 1800, 1, 10, 136, 184, 170, 0)
    assert everything.saved_nano == 48
    assert await ledger.savings("task", where={"team": "ads"}) == []


async def test_an_answer_that_goes_on_after_a_look_up_would_have_been_said_at_once(ledger: Ledger) -> None:
    """A call for 42, of which its words took 6; then 50 for the answer, whose words took 20: 14 more."""
    await write(
        ledger,
        (opened("a1", client_tokens=900), settled("a1", plain_nano=100, fixed_nano=60)),
        (
            opened("a2", request_id="a1", purpose="recall"),
            settled("a2", charge=cost(50), plain_nano=14, fixed_nano=14),
        ),
        (opened("a3", request_id="a1", purpose="recall"), settled("a3", charge=cost(7))),
    )
    [row] = await ledger.savings(EVERYTHING)
    assert (row.requests, row.calls, row.calls_nano, row.cost_nano) == (1, 2, 57, 42 + 57)
    assert (row.plain_nano, row.fixed_nano) == (100 + 14, 60 + 14)
    assert row.saved_nano == 100 + 14 - 42 - 57


async def test_savings_are_narrowed_like_a_report_and_what_is_unknown_is_counted(ledger: Ledger) -> None:
    await compacted(ledger)
    later = opened("a4", task="late", opened_at_us=NOON_US + DAY_US)
    await write(ledger, (later, settled("a4", charge=cost(None))))
    [row] = await ledger.savings("day", since_us=NOON_US + DAY_US)
    assert row == SavingRow("2026-12-01", 1, 0, 0, 0, 0, 0, 0, 0, 1)
    assert row.saved_nano == 0
    [first] = await ledger.savings("team", until_us=NOON_US + DAY_US)
    assert (first.group, first.requests, first.saved_nano) == ("search", 3, 48)
    with pytest.raises(ValueError, match="cannot group by 'colour'"):
        await ledger.savings("colour")


async def test_a_compaction_that_has_not_paid_yet_is_a_loss(ledger: Ledger) -> None:
    await write(
        ledger,
        (opened("a1"), settled("a1", plain_nano=42)),
        (opened("s1", request_id="s1", purpose="summary"), settled("s1", charge=cost(10))),
    )
    [row] = await ledger.savings(EVERYTHING)
    assert row.saved_nano == -10
