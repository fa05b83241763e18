"""`ctxgate report --counterfactual`: what compaction saved, by task or another grouping."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from typing import TYPE_CHECKING

import pytest

from ctxgate.gateway import report_savings
from ctxgate.gateway.cli import main
from ctxgate.gateway.ledger import SavingRow
from ctxgate.gateway.stores.sqlite import SqliteLedger
from support.ledgers import cost, opened, price, settled, write

if TYPE_CHECKING:
    from pathlib import Path

GOOD = SavingRow("build", 40, 12, 1_234_567, 2, 50_000_000, 1_000_000_001, 2_500_000_002, 1_100_000_000, 0)
BAD = SavingRow("chat", 3, 1, 900, 1, 700, 1000, 400, 400, 2)

TABLE = """\
task   requests  compacted    removed  calls    calls USD     cost USD    plain USD    fixed USD     saved USD  part cost
-------------------------------------------------------------------------------------------------------------------------
build        40         12  1,234,567      2  0.050000000  1.000000001  2.500000002  1.100000000   1.500000001          0
chat          3          1        900      1  0.000000700  0.000001000  0.000000400  0.000000400  -0.000000600          2
-------------------------------------------------------------------------------------------------------------------------
total        43         13  1,235,467      3  0.050000700  1.000001001  2.500000402  1.100000400   1.499999401          2
"""  # noqa: E501 - a table is as wide as it is


def test_the_table_begins_with_what_saved_most() -> None:
    assert report_savings.as_table([BAD, GOOD], "task") == TABLE
    assert report_savings.as_table([], "task").startswith("Nothing matched")


def test_json_has_integers_and_decimal_strings() -> None:
    document = json.loads(report_savings.as_json([BAD], "model"))
    assert document["by"] == "model"
    assert document["rows"] == [
        {
            "group": "chat",
            "requests": 3,
            "compacted": 1,
            "removed_tokens": 900,
            "calls": 1,
            "calls_nano": 700,
            "cost_nano": 1000,
            "plain_nano": 400,
            "fixed_nano": 400,
            "saved_nano": -600,
            "calls_usd": "0.0000007",
            "cost_usd": "0.000001",
            "plain_usd": "0.0000004",
            "fixed_usd": "0.0000004",
            "saved_usd": "-0.0000006",
            "unknown_cost": 2,
        }
    ]
    assert document["total"] == {**document["rows"][0], "group": "total"}


@pytest.fixture
def ledger_file(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.db"

    async def fill() -> None:
        ledger = SqliteLedger(path, price=price)
        await write(
            ledger,
            (opened("a1"), settled("a1", plain_nano=42)),
            (opened("s1", request_id="s1", purpose="summary"), settled("s1", charge=cost(10))),
            (opened("a2", client_tokens=900), settled("a2", plain_nano=100, fixed_nano=60)),
        )
        await ledger.close()

    asyncio.run(fill())
    return path


def test_the_command(ledger_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["report", "--counterfactual", "--db", str(ledger_file)]
    assert main(command) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[2].split() == [
        *("fix-bug", "2", "1", "800", "1", "0.000000010"),
        *("0.000000094", "0.000000142", "0.000000102", "0.000000048", "0"),
    ]
    assert main([*command, "--by", "team", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [document["rows"][0][name] for name in ("group", "organisation", "saved_nano")] == [
        *("search", "acme", 48),
    ]
    assert main([*command, "--csv", "--by", "task"]) == 0
    [row] = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert [row[name] for name in ("task", "key_id", "saved_usd")] == ["fix-bug", "key-1", "0.000000048"]


def test_two_reports_at_once_are_refused(ledger_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--counterfactual", "--misses", "--db", str(ledger_file)]) == 2
    assert "one at a time" in capsys.readouterr().err
    assert main(["report", "--counterfactual", "--db", str(ledger_file) + ".none"]) == 2
