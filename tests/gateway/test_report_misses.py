"""`ctxgate report --misses`: the table, JSON, CSV, and what to do about each cause."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from typing import TYPE_CHECKING

import pytest

from ctxgate.compression.divergence import DivergenceKind
from ctxgate.gateway import report_misses
from ctxgate.gateway.cli import main
from ctxgate.gateway.ledger import MissRow
from ctxgate.gateway.miss import Miss, MissCause
from ctxgate.gateway.stores.sqlite import SqliteLedger
from support.ledgers import opened, price, settled, write

if TYPE_CHECKING:
    from pathlib import Path

HEAD = MissRow(
    MissCause.SYSTEM_CHANGED,
    "volatile_in_head/clock",
    "messages[0].content",
    12,
    13,
    1_234_567,
    2_500_000_001,
    0,
)
MOVED = MissRow(MissCause.MOVED_REPLICA, "standard/standard-1", None, 1, 1, 992, 0, 0)
UNTOLD = MissRow(MissCause.NOT_REPORTED, None, None, 3, 3, 0, 0, 3)

TABLE = """\
cause           detail                  field                requests  avoidable tokens  avoidable USD  part
------------------------------------------------------------------------------------------------------------
system_changed  volatile_in_head/clock  messages[0].content        12         1,234,567    2.500000001     0
moved_replica   standard/standard-1     -                           1               992    0.000000000     0
not_reported    -                       -                           3                 0    0.000000000     3

part: 3 attempts whose avoidable tokens or cost are unknown, which the sums leave out.

system_changed (volatile_in_head/clock): take it out of the head. Put it at the end of the last user \
message, or let a tool tell it; a date without the time of day changes once a day. Layout `declared` with \
`volatile: [clock]` moves it there; `learned` finds out by itself what changes.
moved_replica: keep replicas up; a conversation stays on one while its first messages do.
not_reported: start vLLM with `--enable-prompt-tokens-details`.
"""


def test_the_table_and_one_line_of_advice_for_each() -> None:
    assert report_misses.as_table([HEAD, MOVED, UNTOLD]) == TABLE


def test_advice_is_given_once_for_a_cause_in_several_places() -> None:
    other = MissRow(MissCause.MOVED_REPLICA, "fast/fast-0", None, 1, 1, 1, 1, 0)
    assert report_misses.as_table([MOVED, other]).count("keep replicas up") == 1


def test_a_place_that_stands_for_several_is_explained() -> None:
    row = MissRow(MissCause.REORDERED, "tools_reordered", "tools[]", 2, 2, 9, 9, 0)
    assert "\n[]: at several positions;" in report_misses.as_table([row])
    assert "[]" not in report_misses.as_table([HEAD])


def test_without_misses_it_says_so() -> None:
    assert report_misses.as_table([]) == "Nothing matched: no settled attempt here missed the cache.\n"


@pytest.mark.parametrize("cause", [*MissCause])
def test_every_cause_has_advice(cause: MissCause) -> None:
    kinds = {
        MissCause.SYSTEM_CHANGED: ["system_changed", "volatile_in_head/clock"],
        MissCause.TOOLS_CHANGED: ["tools_changed", "tools_reserialized", "volatile_in_head/uuid"],
        MissCause.HISTORY_EDITED: ["history_edited", "history_reserialized"],
        MissCause.REORDERED: ["tools_reordered", "history_reordered"],
        MissCause.MODEL_CHANGED: ["model_changed"],
        MissCause.TEMPLATE_CHANGED: ["template_changed", "history_rewritten"],
        MissCause.SALT: ["salt"],
        MissCause.COMPACTION: ["history_truncated", "by_gateway"],
    }
    for detail in kinds.get(cause, [None]):
        assert report_misses.cure(MissRow(cause, detail, None, 1, 1, 1, 1, 0)).endswith(".")
    assert set(kinds) <= set(MissCause)
    assert len(DivergenceKind) == 14


def test_json_has_integers_a_decimal_string_and_the_advice() -> None:
    document = json.loads(
        report_misses.as_json([HEAD, UNTOLD]), parse_float=lambda text: pytest.fail(f"float {text}")
    )
    first, second = document["misses"]
    assert first["advice"].startswith("take it out of the head.")
    del first["advice"]
    assert first == {
        "cause": "system_changed",
        "detail": "volatile_in_head/clock",
        "field": "messages[0].content",
        "requests": 12,
        "attempts": 13,
        "avoidable_tokens": 1_234_567,
        "avoidable_nano": 2_500_000_001,
        "avoidable_usd": "2.500000001",
        "unknown": 0,
    }
    assert (second["detail"], second["field"], second["unknown"]) == (None, None, 3)


def test_csv() -> None:
    rows = list(csv.DictReader(io.StringIO(report_misses.as_csv([HEAD, UNTOLD]))))
    assert [row["cause"] for row in rows] == ["system_changed", "not_reported"]
    assert (rows[0]["avoidable_usd"], rows[1]["detail"]) == ("2.500000001", "")


@pytest.fixture
def ledger_file(tmp_path: Path) -> Path:
    """Two misses of one team, one of another."""

    async def fill() -> None:
        ledger = SqliteLedger(tmp_path / "ledger.db", price=price)
        miss = Miss(MissCause.REORDERED, "tools_reordered", "tools[3]", 3, 0, 100, 90)
        await write(
            ledger,
            (opened("a1"), settled("a1", miss=miss)),
            (
                opened("a2"),
                settled("a2", miss=Miss(MissCause.EVICTED, avoidable_tokens=5, avoidable_nano=200)),
            ),
            (opened("a3", team="ads"), settled("a3", miss=miss)),
        )
        await ledger.close()

    asyncio.run(fill())
    return tmp_path / "ledger.db"


def test_the_command(ledger_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--misses", "--db", str(ledger_file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:4]] == ["evicted", "reordered"]
    assert "tools[3]" in lines[3]
    assert main(["report", "--misses", "--json", "--db", str(ledger_file), "--team", "ads"]) == 0
    assert [row["cause"] for row in json.loads(capsys.readouterr().out)["misses"]] == ["reordered"]
    assert main(["report", "--misses", "--csv", "--db", str(ledger_file), "--since", "2026-12-01"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_grouping_and_misses_exclude_each_other(ledger_file: Path) -> None:
    with pytest.raises(SystemExit):
        main(["report", "--misses", "--by", "pool", "--db", str(ledger_file)])


def test_a_ledger_that_is_none_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--misses", "--db", str(tmp_path / "none.db")]) == 2
    assert "no such ledger" in capsys.readouterr().err
    (tmp_path / "text.db").write_text("not a database, but long enough to be looked at as one")
    assert main(["report", "--misses", "--db", str(tmp_path / "text.db")]) == 2
    assert capsys.readouterr().err.startswith("ctxgate report: ")
