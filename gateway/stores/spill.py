"""Settlements that the database did not take, kept on disk until it works again or for the next start.

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
    ADDED_COLUMNS,
    COUNTERFACTUAL_COLUMNS,
    MISS_COLUMNS,
    OPENED_COLUMNS,
    SETTLED_COLUMNS,
    opened_from_values,
    opened_values,
    settled_from_values,
    settled_values,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from ctxgate.gateway.ledger import AttemptOpened, AttemptSettled


@dataclass(frozen=True, slots=True)
class Spilled:
    """A settlement, with its opening row where the database never took that either."""

    settled: AttemptSettled
    opened: AttemptOpened | None


class SpillFailed(OSError):
    """The file did not take every row. `kept` rows, the first ones, are in it."""

    def __init__(self, kept: int, cause: OSError) -> None:
        super().__init__(cause.errno, cause.strerror)
        self.kept = kept


def write(path: Path, rows: Iterable[Spilled]) -> None:
    """Append rows and return once they are on the disk; raises SpillFailed."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            kept, failure = _append(file, rows)
            os.fsync(file)
        finally:
            os.close(file)
        _sync_folder(path.parent)
    except OSError as error:  # rows may be in the file, but nothing says that they are on the disk
        raise SpillFailed(0, error) from error
    if failure is not None:
        raise SpillFailed(kept, failure) from failure


def _append(file: int, rows: Iterable[Spilled]) -> tuple[int, OSError | None]:
    """Write line by line; on a failure cut the torn line off, so that later ones begin on their own."""
    kept, end = 0, os.fstat(file).st_size
    for row in rows:
        line = _encode(row).encode() + b"\n"
        try:
            _write_all(file, line)
        except OSError as error:
            os.ftruncate(file, end)
            return kept, error
        kept += 1
        end += len(line)
    return kept, None


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def chunks(path: Path, size: int) -> Iterator[list[Spilled]]:
    """The complete rows of a spill file, `size` at a time; OSError, ValueError for a line that is none."""
    with path.open(encoding="utf-8", newline="\n") as file:
        rows: list[Spilled] = []
        for line in file:
            if not line.endswith("\n"):
                break
            rows.append(_decode(line))
            if len(rows) == size:
                yield rows
                rows = []
        if rows:
            yield rows


def _encode(row: Spilled) -> str:
    opened = None if row.opened is None else dict(zip(OPENED_COLUMNS, opened_values(row.opened), strict=True))
    settled = dict(zip(SETTLED_COLUMNS, settled_values(row.settled), strict=True))
    return json.dumps({"attempt_id": row.settled.attempt_id, "settled": settled, "opened": opened})


def _decode(line: str) -> Spilled:
    fields = json.loads(line)
    try:
        # A line of an earlier version has no word of misses, or of what the call was for.
        unsaid = dict.fromkeys((*MISS_COLUMNS, *COUNTERFACTUAL_COLUMNS))
        settled, opened = unsaid | fields["settled"], fields["opened"]
        return Spilled(
            settled_from_values(fields["attempt_id"], [settled[name] for name in SETTLED_COLUMNS]),
            None
            if opened is None
            else opened_from_values([(ADDED_COLUMNS | opened)[name] for name in OPENED_COLUMNS]),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a spilled settlement: {error}") from error
