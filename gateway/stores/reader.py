"""Reports from a ledger file, over a read-only connection: also while a gateway writes to it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from ctxgate.gateway.ledger import ANSWER, EVERYTHING, FILTERS, LOOK_UP, MissRow, Page, ReportRow, SavingRow
from ctxgate.gateway.miss import MissCause
from ctxgate.gateway.stores.rows import COLUMNS, COUNTS, attempt_from_row
from ctxgate.gateway.stores.schema import connect_read_only

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path
    from types import TracebackType
    from typing import Self

_LATEST_US: Final = 2**63 - 1  # the largest integer of SQLite

_GROUPS: Final = {
    EVERYTHING: (f"'{EVERYTHING}'",),
    "task": ("organisation", "team", "key_id", "task"),
    "team": ("organisation", "team"),
    "pool": ("pool",),
    "model": ("model",),
    "day": ("strftime('%Y-%m-%d', opened_at_us / 1000000, 'unixepoch')",),
    "cause": ("coalesce(miss_cause, 'no miss')",),
    "class": ("coalesce(job_class, 'unknown')",),  # not the default one: rows of former versions have none
}
"""What makes a group; the last one is its name, those before it say whose it is."""

_ESTIMATED: Final = " OR ".join(f"{count}_certainty = 'estimated'" for count in COUNTS)
_SUMS: Final = f"""
    count(DISTINCT request_id),
    count(*),
    coalesce(sum(cached_tokens), 0),
    coalesce(sum(uncached_tokens), 0),
    coalesce(sum(output_tokens), 0),
    coalesce(sum(reasoning_tokens), 0),
    coalesce(sum(cost_total_nano), 0) AS cost,
    sum({_ESTIMATED}),
    sum(uncached_tokens IS NULL OR cached_tokens IS NULL OR output_tokens IS NULL),
    sum(cost_total_nano IS NULL OR cost_uncached_nano IS NULL OR cost_cached_nano IS NULL
        OR cost_output_nano IS NULL)
"""

_FIELD: Final = (
    "CASE WHEN miss_index > 0 THEN replace(miss_field, '[' || miss_index || ']', '[]') ELSE miss_field END"
)
_MISSES: Final = f"""
    miss_cause,
    miss_detail,
    CASE WHEN min(miss_index) = max(miss_index) THEN min(miss_field) ELSE {_FIELD} END,
    count(DISTINCT request_id),
    count(*),
    coalesce(sum(avoidable_tokens), 0),
    coalesce(sum(avoidable_nano), 0),
    sum(avoidable_tokens IS NULL OR avoidable_nano IS NULL)
"""


_ANSWER: Final = f"purpose = '{ANSWER}'"
_LOOK_UP: Final = f"purpose = '{LOOK_UP}'"
_SAVINGS: Final = f"""
    count(DISTINCT CASE WHEN {_ANSWER} THEN request_id END),
    count(DISTINCT CASE WHEN client_tokens IS NOT NULL THEN request_id END),
    coalesce(sum(client_tokens - estimated_prompt_tokens), 0),
    sum(NOT {_ANSWER}),
    coalesce(sum(CASE WHEN NOT {_ANSWER} THEN cost_total_nano END), 0),
    coalesce(sum(cost_total_nano), 0),
    coalesce(sum(CASE WHEN {_ANSWER} THEN coalesce(plain_nano, cost_total_nano)
        WHEN {_LOOK_UP} THEN plain_nano END), 0),
    coalesce(sum(CASE WHEN {_ANSWER} THEN coalesce(fixed_nano, plain_nano, cost_total_nano)
        WHEN {_LOOK_UP} THEN fixed_nano END), 0),
    sum(cost_total_nano IS NULL OR cost_uncached_nano IS NULL OR cost_cached_nano IS NULL
        OR cost_output_nano IS NULL)
"""


class LedgerReader:
    """Blocking queries on one connection; use it from one thread at a time."""

    def __init__(self, path: Path, *, busy_timeout_s: float = 5.0) -> None:
        """Raises FileNotFoundError, SchemaMismatch or sqlite3.Error."""
        self._connection = connect_read_only(path, busy_timeout_s=busy_timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Let the queries inside see one and the same state."""
        self._connection.execute("BEGIN")
        try:
            yield
        finally:
            self._connection.execute("COMMIT")

    def report(
        self,
        by: str,
        *,
        where: Mapping[str, str] | None = None,
        since_us: int = 0,
        until_us: int | None = None,
        dearest_first: bool = False,
        limit: int | None = None,
        offset: int = 0,
    ) -> list[ReportRow]:
        """See `Ledger.report`."""
        conditions, values = _conditions(where, since_us, until_us)
        *owners, _ = keys = _group_columns(by)
        columns = ", ".join(keys)
        order = ["cost DESC"] * dearest_first + [keys[-1], *owners]
        query = (
            f"SELECT {columns}, {_SUMS} FROM attempts WHERE {conditions}"  # noqa: S608  # names
            f" GROUP BY {columns} ORDER BY {', '.join(order)} LIMIT ? OFFSET ?"
        )
        rows = self._connection.execute(query, [*values, -1 if limit is None else limit, offset])
        width = len(owners)
        return [ReportRow(*row[width:], **dict(zip(owners, row[:width], strict=True))) for row in rows]

    def misses(
        self, *, where: Mapping[str, str] | None = None, since_us: int = 0, until_us: int | None = None
    ) -> list[MissRow]:
        """See `Ledger.misses`."""
        conditions, values = _conditions(where, since_us, until_us)
        query = (
            f"SELECT {_MISSES} FROM attempts WHERE {conditions} AND miss_cause IS NOT NULL"  # noqa: S608  # names
            f" GROUP BY miss_cause, miss_detail, {_FIELD} ORDER BY 7 DESC, 6 DESC, 4 DESC, 1, 2, 3"
        )
        rows = self._connection.execute(query, values)
        return [MissRow(MissCause(cause), *rest) for cause, *rest in rows]

    def savings(
        self,
        by: str,
        *,
        where: Mapping[str, str] | None = None,
        since_us: int = 0,
        until_us: int | None = None,
    ) -> list[SavingRow]:
        """See `Ledger.savings`."""
        conditions, values = _conditions(where, since_us, until_us)
        *owners, _ = keys = _group_columns(by)
        columns = ", ".join(keys)
        query = (
            f"SELECT {columns}, {_SAVINGS} FROM attempts WHERE {conditions}"  # noqa: S608  # names
            f" GROUP BY {columns} ORDER BY {', '.join([keys[-1], *owners])}"
        )
        rows = self._connection.execute(query, values)
        width = len(owners)
        return [SavingRow(*row[width:], **dict(zip(owners, row[:width], strict=True))) for row in rows]

    def rows(
        self,
        *,
        where: Mapping[str, str] | None = None,
        since_us: int = 0,
        until_us: int | None = None,
        limit: int = 100,
        cursor: str | None = None,
        newest_first: bool = False,
    ) -> Page:
        """See `Ledger.rows`."""
        if limit < 1:
            raise ValueError("a page has at least one row")
        conditions, values = _conditions(where, since_us, until_us)
        if cursor is not None:
            opened_at_us, _, seq = cursor.partition("-")
            conditions += f" AND (opened_at_us, seq) {'<' if newest_first else '>'} (?, ?)"
            values += [int(opened_at_us), int(seq)]
        order = "DESC" if newest_first else "ASC"
        query = (
            f"SELECT opened_at_us, seq, {COLUMNS} FROM attempts WHERE {conditions}"  # noqa: S608  # names
            f" ORDER BY opened_at_us {order}, seq {order} LIMIT ?"
        )
        found = self._connection.execute(query, [*values, limit + 1]).fetchall()
        page = found[:limit]
        more = len(found) > limit
        return Page(
            attempts=tuple(attempt_from_row(row[2:]) for row in page),
            cursor=f"{page[-1][0]}-{page[-1][1]}" if more else None,
        )


def _group_columns(by: str) -> tuple[str, ...]:
    if by not in _GROUPS:
        raise ValueError(f"cannot group by {by!r}; known: {', '.join(_GROUPS)}")
    return _GROUPS[by]


def _conditions(
    where: Mapping[str, str] | None, since_us: int, until_us: int | None
) -> tuple[str, list[str | int]]:
    conditions = ["settled_at_us IS NOT NULL"]
    values: list[str | int] = []
    if since_us > 0:  # without it, a report over everything reads the table in its own order
        conditions.append("opened_at_us >= ?")
        values.append(min(since_us, _LATEST_US))
    if until_us is not None:
        conditions.append("opened_at_us < ?")
        values.append(max(0, min(until_us, _LATEST_US)))
    for column, value in (where or {}).items():
        if column not in FILTERS:
            raise ValueError(f"cannot filter by {column!r}; known: {', '.join(FILTERS)}")
        conditions.append(f"{column} = ?")
        values.append(value)
    return " AND ".join(conditions), values
