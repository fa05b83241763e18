"""Reports on the terminal, as JSON and as CSV, and the command that prints them."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from typing import TYPE_CHECKING

import pytest

from ctxgate.gateway import report
from ctxgate.gateway.cli import main
from ctxgate.gateway.ledger import ReportRow
from ctxgate.gateway.stores.sqlite import SqliteLedger
from support.ledgers import DAY_US, NOON_US, cost, opened, price, settled

if TYPE_CHECKING:
    from pathlib import Path

ROWS = [
    ReportRow("alpha", 2, 3, 750, 250, 60, 5, 1_234_567_891, 1, 0, 0),
    ReportRow("beta", 1, 1, 0, 0, 0, 0, 0, 0, 1, 1),
    ReportRow("gamma", 12_345, 20_000, 2, 1, 9, 0, 98_765_432_100_000_000_001, 0, 0, 2),
]

TABLE = """\
task   requests  attempts  cached  uncached  output  reasoning    hit                  cost USD  estimated  part tokens  part cost
----------------------------------------------------------------------------------------------------------------------------------
gamma    12,345    20,000       2         1       9          0  66.7%  98,765,432,100.000000001          0            0          2
alpha         2         3     750       250      60          5  75.0%               1.234567891          1            0          0
beta          1         1       0         0       0          0      -               0.000000000          0            1          1
----------------------------------------------------------------------------------------------------------------------------------
total    12,348    20,004     752       251      69          5  75.0%  98,765,432,101.234567892          1            1          3
estimated: 1 attempt with a token count that is an estimate.
part tokens: 1 attempt with an unknown token count, which the sums leave out.
part cost: 3 attempts with an unknown part of the cost, which is a lower bound.
"""  # noqa: E501  # a picture of the table


def test_the_table_is_aligned_and_its_money_exact() -> None:
    assert report.as_table(ROWS, "task") == TABLE


def test_days_stay_in_order_and_other_groups_come_by_cost() -> None:
    rows = [
        ReportRow(day, 1, 1, 0, 0, 0, 0, nano, 0, 0, 0) for day, nano in (("d1", 1), ("d2", 9), ("d3", 5))
    ]
    by_day = report.as_table(rows, "day").splitlines()
    assert [line[:2] for line in by_day[2:5]] == ["d1", "d2", "d3"]
    by_pool = report.as_table(rows, "pool").splitlines()
    assert [line[:2] for line in by_pool[2:5]] == ["d2", "d3", "d1"]


def test_a_report_without_rows_says_that_nothing_matched() -> None:
    assert report.as_table([], "team") == "Nothing matched: there is no settled attempt here.\n"


def test_a_name_that_rows_share_is_followed_by_its_owner() -> None:
    rows = [
        ReportRow("job", 1, 1, 0, 0, 0, 0, nano, 0, 0, 0, "acme", "alpha", key)
        for key, nano in (("ci", 2), ("dev", 3))
    ]
    rows.append(ReportRow("own", 1, 1, 0, 0, 0, 0, 1, 0, 0, 0, "acme", "alpha", "ci"))
    lines = report.as_table(rows, "task").splitlines()[2:5]
    assert [line.split("  ")[0] for line in lines] == ["job (acme/alpha/dev)", "job (acme/alpha/ci)", "own"]


@pytest.mark.parametrize(
    ("by", "owners"),
    [
        ("task", {"organisation": "acme", "team": "alpha", "key_id": "ci"}),
        ("team", {"organisation": "acme"}),
        ("model", {}),
    ],
)
def test_json_and_csv_say_whose_a_group_is(by: str, owners: dict[str, str]) -> None:
    row = ReportRow("job", 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, "acme", "alpha", "ci")
    others = {"organisation", "team", "key_id"} - set(owners)
    [in_json] = json.loads(report.as_json([row], by))["rows"]
    [in_csv] = csv.DictReader(io.StringIO(report.as_csv([row], by)))
    assert (in_json["group"], in_csv[by]) == ("job", "job")
    for found in (in_json, in_csv):
        assert {name: found[name] for name in owners} == owners
        assert not others & (found.keys() - {by})


def test_a_page_is_the_same_in_compact_json_and_tells_where_the_next_one_starts() -> None:
    whole = json.loads(report.as_json(ROWS[:1], "pool"))
    page = report.as_page(ROWS[:1], "pool", limit=1, offset=3)
    assert json.loads(page) == whole | {"next": None}
    assert b"\n" not in page
    followed = json.loads(report.as_page(ROWS[:2], "pool", limit=1, offset=3, totals=report.total(ROWS[:2])))
    assert (followed["rows"], followed["next"], followed["total"]["attempts"]) == (whole["rows"], 4, 4)


def test_names_cannot_steer_the_terminal() -> None:
    row = ReportRow("evil\x1b[2J\nname", 1, 1, 0, 0, 0, 0, 0, 0, 0, 0)
    assert "evil?[2J?name" in report.as_table([row], "task")


def test_the_gateways_own_calls_are_named_and_counted() -> None:
    own = ReportRow("probe", 3, 3, 0, 9, 3, 0, 12, 0, 0, 0, "ctxgate", "ctxgate", "ctxgate")
    other = ReportRow("probe", 1, 1, 0, 5, 1, 0, 30, 0, 0, 0, "acme", "alpha", "ci")
    lines = report.as_table([own, other], "task").splitlines()
    assert lines[2].startswith("probe (acme/alpha/ci)  ")
    assert lines[3].startswith("probe (the gateway's own)  ")
    assert lines[5].split()[:3] == ["total", "4", "4"]
    team = ReportRow("ctxgate", 3, 3, 0, 9, 3, 0, 12, 0, 0, 0, "ctxgate")
    assert "\nctxgate (the gateway's own)  " in report.as_table([team], "team")
    document = json.loads(report.as_json([own], "task"))
    assert (document["rows"][0]["group"], document["rows"][0]["organisation"]) == ("probe", "ctxgate")


@pytest.mark.parametrize(
    ("cached", "uncached", "ratio"),
    [(0, 0, "-"), (0, 5, "0.0%"), (5, 0, "100.0%"), (1, 2, "33.3%"), (2, 1, "66.7%"), (1, 1_999, "0.1%")],
)
def test_the_hit_ratio(cached: int, uncached: int, ratio: str) -> None:
    assert report.hit_ratio(ReportRow("g", 1, 1, cached, uncached, 0, 0, 0, 0, 0, 0)) == ratio


def test_json_has_integers_and_a_decimal_string() -> None:
    document = json.loads(report.as_json(ROWS, "pool"), parse_float=lambda text: pytest.fail(f"float {text}"))
    assert document["by"] == "pool"
    assert [row["group"] for row in document["rows"]] == ["alpha", "beta", "gamma"]
    assert document["rows"][0] == {
        "group": "alpha",
        "requests": 2,
        "attempts": 3,
        "cached_tokens": 750,
        "uncached_tokens": 250,
        "output_tokens": 60,
        "reasoning_tokens": 5,
        "cost_nano": 1_234_567_891,
        "cost_usd": "1.234567891",
        "estimated": 1,
        "unknown_tokens": 0,
        "unknown_cost": 0,
    }
    assert document["total"]["cost_nano"] == 98_765_432_101_234_567_892
    assert document["total"]["cost_usd"] == "98765432101.234567892"


def test_csv_can_be_read_back() -> None:
    quoted = ReportRow('a,"b"', 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    rows = list(csv.DictReader(io.StringIO(report.as_csv([*ROWS, quoted], "task"))))
    assert [row["task"] for row in rows] == ["alpha", "beta", "gamma", 'a,"b"']
    assert (rows[0]["cost_nano"], rows[0]["cost_usd"], rows[0]["attempts"]) == (
        "1234567891",
        "1.234567891",
        "3",
    )


CONFIG = """\
store: {sqlite: ledger.db}
pools:
  fast:
    replicas: [{name: fast-0, url: "http://127.0.0.1:8001"}]
    rates:
      effective: 2026-01-01
      usd_per_million_uncached: 0.40
      usd_per_million_cached: 0.04
      usd_per_million_output: 1.20
models:
  small: {pools: [fast]}
keys: []
"""


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """One request of two attempts in two pools on one day, another team's request on the next."""
    path = tmp_path / "ledger.db"

    async def fill() -> None:
        ledger = SqliteLedger(path, price=price)
        for row in (
            opened("a1"),
            opened("a2", request_id="request-a1", attempt_number=2, pool="standard"),
            opened("a3", team="ads", task="write-docs", opened_at_us=NOON_US + DAY_US),
        ):
            ledger.open(row)
            ledger.settle(settled(row.attempt_id, charge=cost(1_500_000_000)))
        await ledger.close()

    asyncio.run(fill())
    return path


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main(["report", *arguments, "--json"]) == 0
    document: dict[str, object] = json.loads(capsys.readouterr().out)
    return document


def test_the_command_prints_a_table(database: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--db", str(database)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line[0] != "-"] == ["task", "fix-bug", "write-docs", "total"]
    assert lines[2].split()[:4] == ["fix-bug", "1", "2", "160"]


def test_the_command_prints_csv(database: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--db", str(database), "--by", "pool", "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["pool"], row["cost_usd"]) for row in rows] == [("fast", "3"), ("standard", "1.5")]


def test_a_request_of_two_pools_counts_once_in_the_total(
    database: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = printed(capsys, "--db", str(database), "--by", "pool")
    assert [row["requests"] for row in document["rows"]] == [2, 1]  # type: ignore[attr-defined]  # a JSON list
    assert document["total"]["requests"] == 2  # type: ignore[index]  # a JSON object
    assert document["total"]["attempts"] == 3  # type: ignore[index]  # a JSON object


@pytest.mark.parametrize(
    ("arguments", "groups"),
    [
        (["--by", "team", "--team", "ads"], ["ads"]),
        (["--by", "team", "--task", "fix-bug"], ["search"]),
        (["--by", "day", "--since", "2026-12-01"], ["2026-12-01"]),
        (["--by", "day", "--until", "2026-12-01"], ["2026-11-30"]),
        (["--by", "model", "--key", "key-1"], ["small"]),
        (["--by", "model", "--organisation", "nobody"], []),
    ],
)
def test_the_command_narrows(
    database: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], groups: list[str]
) -> None:
    document = printed(capsys, "--db", str(database), *arguments)
    assert [row["group"] for row in document["rows"]] == groups  # type: ignore[attr-defined]  # a JSON list


def test_the_command_reads_while_a_gateway_writes(database: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def attempts() -> int:
        ledger = SqliteLedger(database, price=price)
        await asyncio.gather(ledger.open(opened("a4")), ledger.settle(settled("a4")))
        document = await asyncio.to_thread(printed, capsys, "--db", str(database))
        await ledger.close()
        return document["total"]["attempts"]  # type: ignore[index,no-any-return]  # a JSON object

    assert asyncio.run(attempts()) == 4


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (None, "no such ledger"),
        (b"", "version 0 of the ledger"),
        (b"not SQLite at all" * 99, "not a database"),
    ],
)
def test_an_unusable_database_is_a_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], contents: bytes | None, message: str
) -> None:
    path = tmp_path / "ledger.db"
    if contents is not None:
        path.write_bytes(contents)
    assert main(["report", "--db", str(path)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert f"{path}: " in shown.err
    assert message in shown.err
    assert shown.err.count("\n") == 1


def test_an_unusable_instant_is_a_clear_error(database: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--db", str(database), "--since", "tomorrow"]) == 2
    assert "'tomorrow' is no moment" in capsys.readouterr().err


def test_the_help_explains_the_columns(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["report", "--help"])
    assert exit_.value.code == 0
    assert "part cost     attempts with an unknown part of their cost" in capsys.readouterr().out


def test_a_report_that_matches_nothing_says_so(database: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--db", str(database), "--team", "nobody"]) == 0
    assert capsys.readouterr().out == "Nothing matched: there is no settled attempt here.\n"


def test_an_unknown_grouping_ends_with_usage(database: Path) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["report", "--db", str(database), "--by", "replica"])
    assert exit_.value.code == 2


def test_the_command_finds_the_ledger_by_the_configuration(
    database: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = database.with_name("ctxgate.yaml")
    config.write_text(CONFIG)
    assert printed(capsys, "-c", str(config))["total"]["attempts"] == 3  # type: ignore[index]  # a JSON object


def test_an_unusable_configuration_is_a_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "ctxgate.yaml"
    config.write_text(CONFIG.replace("sqlite:", "sqlight:"))
    assert main(["report", "-c", str(config)]) == 2
    assert "sqlight" in capsys.readouterr().err
