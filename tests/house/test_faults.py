"""docs/faults.md says of each kind of fault which files test it; here that is held against the tests."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "faults.md"
AREAS = "api|context|gateways|routing"
ROW = re.compile(rf"^\| ((?:{AREAS})-[A-Z]\d+) \| [A-Z][^|]+\. \| ([^|]+) \|$", re.MULTILINE)
LINK = re.compile(r"\]\(\.\./(tests/[\w/]+\.py)\)")
# A test names the rows that it covers before all else: test_gateways_a11_a13_api_b5_...
NAMED = re.compile(rf"^(?:async )?def test((?:_(?:{AREAS})(?:_[a-z]\d+)+)+)_", re.MULTILINE)
AREA = re.compile(rf"_({AREAS})((?:_[a-z]\d+)+)")


def listed() -> dict[str, set[str]]:
    """The test files of each row of the page."""
    return {row: set(LINK.findall(tests)) for row, tests in ROW.findall(PAGE.read_text(encoding="utf-8"))}


def named() -> dict[str, set[str]]:
    """The files whose tests carry a row in their name."""
    files: dict[str, set[str]] = defaultdict(set)
    for path in (ROOT / "tests").rglob("test_*.py"):
        for name in NAMED.findall(path.read_text(encoding="utf-8")):
            for area, rows in AREA.findall(name):
                for row in rows.strip("_").split("_"):
                    files[f"{area}-{row.upper()}"].add(path.relative_to(ROOT).as_posix())
    return files


def test_every_line_of_the_table_is_read() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if re.match(rf"\| (?:{AREAS})-", line)]
    assert len(listed()) == len(rows) > 0


def test_every_row_names_exactly_the_files_that_test_it() -> None:
    tests = named()
    assert listed() == {row: tests.get(row, set()) for row in listed()}
