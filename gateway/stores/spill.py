"""Settlements that the database did not take before the process stopped, kept for the next start.

One append-only file per process in `<database>.spill/`, one JSON object per line: `attempt_id`, and
the columns of `settled` and `opened` (null where the opening row is in the database). A line counts
once its line feed is there: a torn last line is dropped.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ctxgate.gateway.stores.rows import (
    OPENED_COLUMNS,
    SETTLED_COLUMNS,
    opened_from_values,
    opened_values,
    settled_from_values,
    settled_values,
)

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ctxgate.gateway.ledger import AttemptOpened, AttemptSettled


@dataclass(frozen=True, slots=True)
class Spilled:
    """A settlement, with its opening row where the database never took that either."""

    settled: AttemptSettled
    opened: AttemptOpened | None


def write(path: Path, rows: Iterable[Spilled]) -> None:
    """Append rows and return once they are on the disk; raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8", opener=_private) as file:
        file.writelines(_encode(row) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read(path: Path) -> list[Spilled]:
    """The complete rows of a spill file; ValueError for a line that is none."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return [_decode(line) for line in lines[:-1]]


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _encode(row: Spilled) -> str:
    opened = None if row.opened is None else dict(zip(OPENED_COLUMNS, opened_values(row.opened), strict=True))
    settled = dict(zip(SETTLED_COLUMNS, settled_values(row.settled), strict=True))
    return json.dumps({"attempt_id": row.settled.attempt_id, "settled": settled, "opened": opened})


def _decode(line: str) -> Spilled:
    fields = json.loads(line)
    try:
        settled, opened = fields["settled"], fields["opened"]
        return Spilled(
            settled_from_values(fields["attempt_id"], [settled[name] for name in SETTLED_COLUMNS]),
            None if opened is None else opened_from_values([opened[name] for name in OPENED_COLUMNS]),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a spilled settlement: {error}") from error
