"""The schema of the SQLite store and the steps that brought it here; `schema_version` counts them.

The invariant: migrations only go forward, each in one transaction, and a step that was released is never edited; a file from a
newer release, or of another program, is refused untouched.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final

from lightning.errors import SchemaError
from lightning.store.sqlite.connection import Settings

APPLICATION_ID: Final = 0x4C524C53
"""Lets `file` and this program tell a store from any other SQLite database ("LRLS")."""

_FIRST: Final = (
    """CREATE TABLE runs (
        n INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        name TEXT NOT NULL,
        config TEXT NOT NULL,
        created_at REAL NOT NULL
    )""",
    """CREATE TABLE rollouts (
        n INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        run TEXT NOT NULL,
        task TEXT NOT NULL,
        group_id TEXT NOT NULL,
        step INTEGER NOT NULL,
        split TEXT NOT NULL,
        idx INTEGER NOT NULL,
        max_attempts INTEGER NOT NULL,
        status TEXT NOT NULL DEFAULT 'pending',
        attempt INTEGER NOT NULL DEFAULT 0,
        spent INTEGER NOT NULL DEFAULT 0,
        worker TEXT NOT NULL DEFAULT '',
        lease_until REAL,
        reward REAL,
        rewards TEXT NOT NULL DEFAULT '{}',
        fault TEXT NOT NULL DEFAULT '',
        error TEXT NOT NULL DEFAULT '',
        seconds REAL NOT NULL DEFAULT 0,
        trained_at_step INTEGER
    )""",
    "CREATE INDEX rollouts_by_run ON rollouts (run, n)",
    "CREATE INDEX rollouts_by_status ON rollouts (run, status, n)",
    "CREATE INDEX rollouts_by_step ON rollouts (run, step, n)",
    "CREATE INDEX rollouts_by_group ON rollouts (run, group_id)",
    "CREATE INDEX rollouts_by_lease ON rollouts (run, lease_until) WHERE status = 'running'",
    "CREATE INDEX rollouts_by_worker ON rollouts (worker) WHERE status = 'running'",
    """CREATE TABLE attempts (
        n INTEGER PRIMARY KEY,
        rollout TEXT NOT NULL,
        attempt INTEGER NOT NULL,
        worker TEXT NOT NULL,
        leased_at REAL NOT NULL,
        ended_at REAL,
        ending TEXT NOT NULL DEFAULT '',
        outcome_digest TEXT NOT NULL DEFAULT '',
        tool_events TEXT NOT NULL DEFAULT '[]',
        step_rewards TEXT NOT NULL DEFAULT '[]',
        UNIQUE (rollout, attempt)
    )""",
    # `rollout` and `parent` hold the `n` of a row, not its text id: that text would be an eighth of a transition.
    """CREATE TABLE transitions (
        n INTEGER PRIMARY KEY,
        rollout INTEGER NOT NULL,
        attempt INTEGER NOT NULL,
        seq INTEGER NOT NULL,
        parent INTEGER,
        id TEXT NOT NULL,
        caller TEXT NOT NULL,
        versions TEXT NOT NULL,
        status TEXT NOT NULL,
        finish_reason TEXT NOT NULL,
        choice INTEGER NOT NULL,
        temperature REAL NOT NULL,
        constrained INTEGER NOT NULL,
        started_at REAL NOT NULL,
        ended_at REAL NOT NULL,
        digest BLOB NOT NULL,
        tokens BLOB NOT NULL,
        UNIQUE (rollout, attempt, seq)
    )""",
    "CREATE INDEX transitions_roots ON transitions (rollout) WHERE parent IS NULL",
    """CREATE TABLE steps (
        run TEXT NOT NULL,
        step INTEGER NOT NULL,
        policy_version INTEGER NOT NULL,
        rollouts TEXT NOT NULL,
        digests TEXT NOT NULL,
        digest TEXT NOT NULL,
        checkpoint TEXT NOT NULL,
        metrics TEXT NOT NULL,
        at REAL NOT NULL,
        PRIMARY KEY (run, step)
    )""",
    # A NULL value is NaN: SQLite has no other way to keep one.
    """CREATE TABLE metrics (
        run TEXT NOT NULL,
        step INTEGER NOT NULL,
        name TEXT NOT NULL,
        value REAL,
        at REAL NOT NULL,
        PRIMARY KEY (run, step, name)
    )""",
    """CREATE TABLE state (
        run TEXT NOT NULL,
        name TEXT NOT NULL,
        value TEXT NOT NULL,
        PRIMARY KEY (run, name)
    )""",
)

_LABELS: Final = ("ALTER TABLE attempts ADD COLUMN labels TEXT NOT NULL DEFAULT '{}'",)

_SPANS: Final = (
    "ALTER TABLE transitions ADD COLUMN tool_calls TEXT NOT NULL DEFAULT '[]'",
    # `rollout` holds the `n` of a row, as in transitions.
    """CREATE TABLE spans (
        n INTEGER PRIMARY KEY,
        rollout INTEGER NOT NULL,
        attempt INTEGER NOT NULL,
        span_id TEXT NOT NULL,
        trace_id TEXT NOT NULL,
        parent_id TEXT NOT NULL,
        name TEXT NOT NULL,
        kind TEXT NOT NULL,
        started_at REAL NOT NULL,
        ended_at REAL NOT NULL,
        status TEXT NOT NULL,
        error TEXT NOT NULL,
        service TEXT NOT NULL,
        attributes TEXT NOT NULL,
        UNIQUE (rollout, attempt, span_id)
    )""",
)

_RESOURCES: Final = (
    "ALTER TABLE steps ADD COLUMN group_ids TEXT NOT NULL DEFAULT '[]'",
    "ALTER TABLE rollouts ADD COLUMN resources TEXT NOT NULL DEFAULT '{}'",
    """CREATE TABLE resources (
        n INTEGER PRIMARY KEY,
        name TEXT NOT NULL,
        version INTEGER NOT NULL,
        kind TEXT NOT NULL,
        digest TEXT NOT NULL,
        content TEXT NOT NULL,
        metadata TEXT NOT NULL,
        created_at REAL NOT NULL,
        UNIQUE (name, version),
        UNIQUE (name, digest)
    )""",
    # A row for each move; `earlier` is the `n` of the move to return to.
    """CREATE TABLE aliases (
        n INTEGER PRIMARY KEY,
        name TEXT NOT NULL,
        alias TEXT NOT NULL,
        version INTEGER NOT NULL,
        at REAL NOT NULL,
        earlier INTEGER
    )""",
    "CREATE INDEX aliases_by_name ON aliases (name, alias, n)",
)

_PROJECTS: Final = (
    "ALTER TABLE runs ADD COLUMN project TEXT NOT NULL DEFAULT 'default'",
    "CREATE INDEX runs_by_project ON runs (project, created_at)",
    # How often a run has changed: what other processes watch.
    "CREATE TABLE revisions (run TEXT PRIMARY KEY, n INTEGER NOT NULL)",
    """CREATE TABLE tokens (
        n INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        scope TEXT NOT NULL,
        digest TEXT NOT NULL,
        project TEXT NOT NULL,
        name TEXT NOT NULL,
        created_at REAL NOT NULL,
        expires_at REAL,
        revoked_at REAL
    )""",
)

_ANSWERS: Final = (
    # What calls were answered, by the names of the calls, until a time by the database's clock; for when they come again.
    "CREATE TABLE answers (id TEXT PRIMARY KEY, run TEXT NOT NULL, until REAL NOT NULL, answer TEXT NOT NULL)",
    "CREATE INDEX answers_by_time ON answers (until)",
    "CREATE INDEX answers_by_run ON answers (run) WHERE run <> ''",
)

_CONVERSATIONS: Final = ("ALTER TABLE transitions ADD COLUMN conversation TEXT NOT NULL DEFAULT ''",)

_CONTEXT: Final = ("ALTER TABLE steps ADD COLUMN context TEXT NOT NULL DEFAULT '{}'",)

MIGRATIONS: Final[tuple[tuple[str, ...], ...]] = (
    _FIRST,
    _LABELS,
    _SPANS,
    _RESOURCES,
    _PROJECTS,
    _ANSWERS,
    _CONVERSATIONS,
    _CONTEXT,
)
"""`MIGRATIONS[i]` brings a database from version i to i + 1."""


def refuse_foreign(settings: Settings) -> None:
    """Raise `SchemaError` for a newer or a foreign database and leave it as it is: `connect` would change its journal mode.

    Nothing is refused when there is no file yet, or none that can be opened: `connect` says why.
    """
    if settings.in_memory:
        return
    try:
        # A reader that may write folds a log that lies beside the file into it; one that may not would create a log.
        mode = "ro" if Path(f"{settings.path}-wal").exists() else "rw"
        connection = sqlite3.connect(
            f"{Path(settings.path).absolute().as_uri()}?mode={mode}",
            uri=True,
            timeout=settings.busy_timeout,
            isolation_level=None,
        )
    except (OSError, sqlite3.OperationalError):
        return
    with closing(connection):
        _version(connection, settings)


def migrate(connection: sqlite3.Connection, settings: Settings) -> None:
    """Bring the schema to the newest version. Raises `SchemaError` for a newer or a foreign database."""
    if _version(connection, settings) == len(MIGRATIONS):
        return
    connection.execute("BEGIN IMMEDIATE")  # another process may migrate at this moment: look again under the lock
    try:
        version = _version(connection, settings)
        for statements in MIGRATIONS[version:]:
            for statement in statements:
                connection.execute(statement)
        connection.execute("UPDATE schema_version SET version = ?", (len(MIGRATIONS),))
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _version(connection: sqlite3.Connection, settings: Settings) -> int:
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if "schema_version" not in tables:
        if tables:
            raise SchemaError(
                f"store {settings.path} is an SQLite database of another program (tables {', '.join(sorted(tables)[:5])}): "
                "choose another path"
            )
        if connection.in_transaction:
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute("CREATE TABLE schema_version (version INTEGER NOT NULL)")
            connection.execute("INSERT INTO schema_version (version) VALUES (0)")
        return 0
    rows = connection.execute("SELECT version FROM schema_version").fetchall()
    if len(rows) != 1 or not isinstance(rows[0][0], int) or rows[0][0] < 0:
        raise SchemaError(f"store {settings.path} has a damaged schema_version {rows!r}: restore it from a backup")
    version: int = rows[0][0]
    if version > len(MIGRATIONS):
        raise SchemaError(
            f"store {settings.path} has schema version {version}, this release knows {len(MIGRATIONS)}: "
            "it was written by a newer release. Run: pip install -U 'lightning<1', or choose another path"
        )
    return version
