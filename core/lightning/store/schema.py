"""The schema of every store: its number, the refusal of a database with another schema, and the tables of SQL databases.

The invariant: there is one schema. Every kind of store refuses a database with another schema in the same words and leaves it
untouched. The tables are written in SQLite's types, which other databases translate. Any change of the tables or of their
content needs another number (`SCHEMA`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lightning.errors import SchemaError
from lightning.installation import other_format

SCHEMA: Final = 9
"""The number of the present tables and columns, or keys, and of the form of their content."""


def refuse_other_schema(where: str, found: object) -> None:
    """Raise `SchemaError` unless the version `found` in a database is the present schema's. `where` names the database."""
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise SchemaError(f"{where} has a damaged schema version ({found!r}): restore it from a backup")
    if found != SCHEMA:
        raise SchemaError(other_format(f"{where} has schema {found}", f"schema {SCHEMA}"))


VERSION: Final = "SELECT version FROM schema_version"
REVISIONS: Final = "CREATE TABLE revisions (run TEXT PRIMARY KEY, n INTEGER NOT NULL)"
"""The table that counts the changes of each run. Other processes watch it if the database cannot notify them."""

STATEMENTS: Final = (
    "CREATE TABLE schema_version (version INTEGER NOT NULL)",
    f"INSERT INTO schema_version (version) VALUES ({SCHEMA})",  # noqa: S608 — a number of ours
    """CREATE TABLE runs (
        n INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        name TEXT NOT NULL,
        config TEXT NOT NULL,
        created_at REAL NOT NULL,
        project TEXT NOT NULL
    )""",
    "CREATE INDEX runs_by_project ON runs (project, created_at)",
    # `parent` is the key of a call as JSON; empty: a rollout that is no branch.
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
        trained_at_step INTEGER,
        resources TEXT NOT NULL,
        parent TEXT NOT NULL
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
        labels TEXT NOT NULL DEFAULT '{}',
        step_states TEXT NOT NULL DEFAULT '[]',
        extras BLOB,
        UNIQUE (rollout, attempt)
    )""",
    # `rollout` and `parent` hold the `n` of a row, not its text id: that text would be an eighth of a transition.
    # `extras` are those of plugins, packed; NULL where there are none.
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
        tool_calls TEXT NOT NULL,
        error TEXT NOT NULL,
        max_tokens_asked INTEGER NOT NULL,
        requested_model TEXT NOT NULL,
        untrained TEXT NOT NULL,
        rejects TEXT NOT NULL,
        extras BLOB,
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
        group_ids TEXT NOT NULL,
        context TEXT NOT NULL,
        policy TEXT NOT NULL,
        extras BLOB,
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
    REVISIONS,
    # How many steps of its tables each plugin's group has made (`lightning.store.relational.transaction.make_tables`).
    "CREATE TABLE operation_groups (name TEXT PRIMARY KEY, version INTEGER NOT NULL)",
    # The answers of calls by the names of the calls, kept for repeated calls until a time by the database's clock.
    "CREATE TABLE answers (id TEXT PRIMARY KEY, run TEXT NOT NULL, until REAL NOT NULL, answer TEXT NOT NULL)",
    "CREATE INDEX answers_by_time ON answers (until)",
    "CREATE INDEX answers_by_run ON answers (run) WHERE run <> ''",
)


def check_version(where: str, rows: Sequence[Sequence[object]]) -> None:
    """Raise `SchemaError` unless `rows`, the result of `VERSION`, give the present schema. `where` names the database."""
    refuse_other_schema(where, rows[0][0] if len(rows) == 1 else None)
