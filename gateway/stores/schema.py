"""The SQLite schema of the ledger, of first-seen forms and of the archive, and its migrations forward."""

from __future__ import annotations

import sqlite3
import time
from typing import TYPE_CHECKING, Final

from ctxgate.gateway.ledger import SchemaMismatch

if TYPE_CHECKING:
    from pathlib import Path

APPLICATION_ID: Final = 0x63747867  # "ctxg", in the file's header
MAX_LOG_PAGES: Final = 20_000  # 80 MB; the usual checkpoint comes long before, off the writer's thread
_AGAIN_S: Final = 0.005

_COUNTS: Final = ("uncached", "cached", "output", "reasoning", "written", "prompt_total")


def _count_columns() -> str:
    """Two columns per count, and what `Count` demands of them.

    The checks are written with OR: an IN list of three builds a temporary index for every row.
    """
    known = "{0}_certainty IS 'measured' OR {0}_certainty IS 'estimated'"
    counted = f"{{0}}_tokens IS NOT NULL AND {{0}}_tokens >= 0 AND ({known})"
    absent = "{0}_tokens IS NULL AND ({0}_certainty IS 'unknown' OR settled_at_us IS NULL)"
    column = f"{{0}}_tokens INTEGER, {{0}}_certainty TEXT CHECK ({counted} OR {absent})"
    return ",\n".join(column.format(name) for name in _COUNTS)


_ATTEMPTS: Final = f"""
CREATE TABLE attempts (
    seq INTEGER PRIMARY KEY,
    attempt_id TEXT NOT NULL UNIQUE,
    request_id TEXT NOT NULL,
    attempt_number INTEGER NOT NULL,
    organisation TEXT NOT NULL,
    team TEXT NOT NULL,
    key_id TEXT NOT NULL,
    task TEXT NOT NULL,
    task_source TEXT NOT NULL,
    surface TEXT NOT NULL,
    model TEXT NOT NULL,
    pool TEXT NOT NULL,
    replica TEXT NOT NULL,
    stream INTEGER NOT NULL CHECK (stream IN (0, 1)),
    body_bytes INTEGER NOT NULL,
    opened_at_us INTEGER NOT NULL,
    predicted_cached_tokens INTEGER,
    estimated_prompt_tokens INTEGER,
    incarnation TEXT NOT NULL,
    outcome TEXT,
    status INTEGER,
    finish_reason TEXT,
    ttft_us INTEGER,
    total_us INTEGER,
    settled_at_us INTEGER CHECK ((settled_at_us IS NULL) = (outcome IS NULL)),
    {_count_columns()},
    cost_uncached_nano INTEGER,
    cost_cached_nano INTEGER,
    cost_output_nano INTEGER,
    cost_total_nano INTEGER,
    cost_exact INTEGER CHECK (cost_exact IN (0, 1)),
    rates_effective TEXT
) STRICT
"""

_FORMS: Final = """
CREATE TABLE forms (
    tenant TEXT NOT NULL,
    key BLOB NOT NULL CHECK (length(key) = 32),
    text BLOB NOT NULL,
    seen_us INTEGER NOT NULL,
    PRIMARY KEY (tenant, key)
) STRICT
"""

_OF_A_MISS: Final = "CHECK ({0} IS NULL OR {0} >= 0 AND miss_cause IS NOT NULL)"
_MISSES: Final = (
    "miss_cause TEXT",
    "miss_detail TEXT CHECK (miss_detail IS NULL OR miss_cause IS NOT NULL)",
    "miss_field TEXT CHECK (miss_field IS NULL OR miss_cause IS NOT NULL)",
    *(
        f"{name} INTEGER {_OF_A_MISS.format(name)}"
        for name in ("miss_index", "miss_offset", "avoidable_tokens")
    ),
    "avoidable_nano INTEGER CHECK (avoidable_nano IS NULL OR miss_cause IS NOT NULL)",
)

_PURPOSE: Final = (
    "purpose TEXT NOT NULL DEFAULT 'answer' CHECK (purpose <> '')",
    "client_tokens INTEGER CHECK (client_tokens IS NULL OR client_tokens >= 0)",
    "plain_nano INTEGER",
    "fixed_nano INTEGER",
)

_ROUTING: Final = (
    "job_class TEXT",
    "predicted_ttft_us INTEGER CHECK (predicted_ttft_us IS NULL OR predicted_ttft_us >= 0)",
    "fits INTEGER CHECK (fits IS NULL OR fits IN (0, 1))",
    "policy TEXT",
)

# One original may be used by several tasks and conversations; `seq` is the order in which they came.
_ARCHIVE: Final = (
    """
CREATE TABLE archive (
    tenant TEXT NOT NULL,
    id TEXT NOT NULL,
    body BLOB NOT NULL,
    size INTEGER NOT NULL CHECK (size >= 0),
    kept_us INTEGER NOT NULL,
    PRIMARY KEY (tenant, id)
) STRICT
""",
    """
CREATE TABLE archive_uses (
    seq INTEGER PRIMARY KEY,
    tenant TEXT NOT NULL,
    task TEXT NOT NULL,
    conversation BLOB NOT NULL,
    id TEXT NOT NULL,
    UNIQUE (tenant, task, conversation, id)
) STRICT
""",
    "CREATE INDEX archive_kept ON archive (kept_us)",
    "CREATE INDEX archive_uses_of ON archive_uses (tenant, id)",
    "CREATE INDEX archive_uses_in ON archive_uses (tenant, conversation)",
)

MIGRATIONS: Final[tuple[tuple[str, ...], ...]] = (
    (
        _ATTEMPTS,
        "CREATE INDEX attempts_open ON attempts (incarnation) WHERE settled_at_us IS NULL",
        "CREATE INDEX attempts_tenant ON attempts (organisation, team, opened_at_us)",
        "CREATE INDEX attempts_task ON attempts (task, opened_at_us)",
        "CREATE INDEX attempts_time ON attempts (opened_at_us)",
    ),
    (_FORMS,),
    (
        *(f"ALTER TABLE attempts ADD COLUMN {column}" for column in _MISSES),
        "CREATE INDEX forms_seen ON forms (seen_us)",
    ),
    (*(f"ALTER TABLE attempts ADD COLUMN {column}" for column in _PURPOSE), *_ARCHIVE),
    (*(f"ALTER TABLE attempts ADD COLUMN {column}" for column in _ROUTING),),
)
"""Statements that lead from version N (their index) to N + 1. Never edited, only appended to."""

VERSION: Final = len(MIGRATIONS)


def connect(path: Path, *, busy_timeout_s: float, synchronous: str) -> sqlite3.Connection:
    """Open the ledger for writing in WAL mode, creating or migrating it; raises SchemaMismatch."""
    connection = sqlite3.connect(path, timeout=busy_timeout_s, isolation_level=None, check_same_thread=False)
    try:
        _checked_version(connection, str(path))
        _use_wal(connection, path, busy_timeout_s)
        connection.execute(f"PRAGMA synchronous = {synchronous}")
        connection.execute(f"PRAGMA wal_autocheckpoint = {MAX_LOG_PAGES}")
        migrate(connection, str(path))
        connection.execute("PRAGMA busy_timeout = 0")  # from here on the writer itself waits
    except BaseException:
        connection.close()
        raise
    return connection


def _use_wal(connection: sqlite3.Connection, path: Path, busy_timeout_s: float) -> None:
    """Switch the file to WAL mode. SQLite itself does not wait for another process that does the same."""
    deadline = time.monotonic() + busy_timeout_s
    while True:
        try:
            mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
                raise
            time.sleep(_AGAIN_S)
            continue
        if mode != ("wal",):
            raise SchemaMismatch(f"{path}: this file system does not support SQLite's WAL mode")
        return


def migrate(connection: sqlite3.Connection, name: str) -> None:
    """Bring the schema to VERSION in one transaction; safe with several processes at once."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        version = _checked_version(connection, name)
        for statements in MIGRATIONS[version:]:
            for statement in statements:
                connection.execute(statement)
        if version != VERSION:
            connection.execute(f"PRAGMA user_version = {VERSION}")
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def connect_read_only(path: Path, *, busy_timeout_s: float) -> sqlite3.Connection:
    """Open an existing ledger for reading; FileNotFoundError, SchemaMismatch or sqlite3.Error."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such ledger")
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=ro",
        uri=True,
        timeout=busy_timeout_s,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        version = _checked_version(connection, str(path))
        if version != VERSION:
            raise SchemaMismatch(
                f"{path}: version {version} of the ledger, not {VERSION}: start the gateway once"
            )
    except BaseException:
        connection.close()
        raise
    return connection


_MARKS: Final = (
    "SELECT user_version, application_id, (SELECT count(*) FROM sqlite_master)"
    " FROM pragma_user_version, pragma_application_id"
)
"""One statement, so that all three are of one moment: another process may be creating the file."""


def _checked_version(connection: sqlite3.Connection, name: str) -> int:
    version, application, tables = connection.execute(_MARKS).fetchone()
    if application != APPLICATION_ID and (tables or version or application):
        raise SchemaMismatch(f"{name}: this SQLite file is not a ctxgate ledger")
    if version > VERSION:
        raise SchemaMismatch(f"{name}: ledger of version {version}; this program knows up to {VERSION}")
    return int(version)
