"""Brings an SQLite file to the newest schema (`relational.schema`); `schema_version` counts the steps it has taken.

The invariant: migrations only go forward, each in one transaction; a file from a newer release, or of another program, is
refused untouched.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final

from lightning.errors import SchemaError
from lightning.store.relational.schema import MIGRATIONS
from lightning.store.sqlite.connection import Settings

APPLICATION_ID: Final = 0x4C524C53
"""Lets `file` and this program tell a store from any other SQLite database ("LRLS")."""


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
