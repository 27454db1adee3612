"""`SqliteKeeper`: looks after one SQLite file.

The invariant: looking at a file never changes it. A copy appears whole or not at all.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final, TypeVar

from lightning.errors import SchemaError, StoreError
from lightning.store.relational.transaction import Operation, Transaction
from lightning.store.sqlite import SqliteStore
from lightning.store.sqlite.connection import Settings, connect, refuse_foreign, translate
from lightning.store.sqlite.store import SqliteTransaction, drive
from lightning.store.url import parse, sqlite_url

from lightning_db.export_files import new_file
from lightning_db.relational import RelationalKeeper

T = TypeVar("T")
_TABLES: Final = "SELECT name FROM sqlite_master WHERE type = 'table'"


class SqliteKeeper(RelationalKeeper):
    """The keeper of the file that a `sqlite:///` URL names."""

    def __init__(self, url: str) -> None:
        where = parse(url)
        SqliteStore.from_url(where)  # refuses an invalid URL
        super().__init__(url)
        self._path = Path(where.path)
        self._settings = Settings(where.path, busy_timeout=float(where.options.get("busy_timeout", "30")))

    async def backup(self, target: Path) -> None:
        """Write a copy of the file (`Keeper.backup`) by SQLite's online backup, in one step, for which no writer waits."""
        await self._snapshot(lambda connection: copy_file(connection, target))

    async def restore(self, source: Path) -> None:
        """Fill this file, which must not exist, from a backup (`Keeper.restore`)."""
        if self._path.exists():
            raise StoreError(
                f"{self._path} exists already: restore into a file that does not, and rename it afterwards"
            )
        await SqliteKeeper(sqlite_url(source)).backup(self._path)

    async def _tables(self, transaction: Transaction) -> set[str]:
        return {row[0] for row in await transaction.all(_TABLES)}

    async def _bytes(self, transaction: Transaction) -> int:
        return _size(self._path) + _size(Path(f"{self._path}-wal"))

    async def _give_back(self) -> str:
        """Shrink the file by `VACUUM` if no other process has it open: it takes minutes for a large file, and other processes
        could not write meanwhile. Return why the file was not shrunk; empty if it was."""

        def rewrite(connection: sqlite3.Connection) -> str:
            if not connection.execute("PRAGMA freelist_count").fetchone()[0]:
                return ""
            if not _take_alone(connection):
                return (
                    f"{self._path} keeps its size, since it is open in another process: what is written next uses the space. "
                    "The same command makes it smaller once nobody else has it open"
                )
            connection.execute("VACUUM")
            return ""

        return await self._connected(rewrite)

    async def _read(self, operation: Operation[T]) -> T:
        return await self._snapshot(lambda connection: drive(operation(SqliteTransaction(connection))))

    async def _write(self, operation: Operation[T], *, alone: bool = False) -> T:
        """Run an operation in one transaction and return its result. With `alone` raise `StoreError` if another process has the
        file open. The removal of rollouts needs this, because SQLite gives the number of a removed row to a new one, and a
        process that appends caches attempts by these numbers."""

        def run(connection: sqlite3.Connection) -> T:
            if alone and not _take_alone(connection):
                raise StoreError(
                    f"{self._path} is open in another process: end the trainers, servers and commands that use it first"
                )
            with _transaction(connection):
                return drive(operation(SqliteTransaction(connection)))

        return await self._connected(run)

    async def _snapshot(self, operation: Callable[[sqlite3.Connection], T]) -> T:
        """Run an operation in one reading transaction, and return its result."""

        def run(connection: sqlite3.Connection) -> T:
            with _transaction(connection, "DEFERRED"):
                return operation(connection)

        return await self._connected(run, read_only=True)

    async def _connected(self, operation: Callable[[sqlite3.Connection], T], *, read_only: bool = False) -> T:
        """Run an operation on a new connection, in another thread, and return its result."""

        def run() -> T:
            refuse_foreign(self._settings, make=False)
            with closing(connect(self._settings, read_only=read_only)) as connection:
                return operation(connection)

        try:
            return await asyncio.to_thread(run)
        except (sqlite3.Error, OSError) as error:
            raise translate(error, self._settings) from error


def copy_file(source: sqlite3.Connection, target: Path) -> None:
    """Copy a database, as this connection's transaction sees it, into a new file. Raises `StoreError` if the file exists, and
    `SchemaError` for a damaged database."""
    with new_file(target) as unfinished, closing(sqlite3.connect(unfinished, isolation_level=None)) as copy:
        source.backup(copy)
        copy.execute("PRAGMA journal_mode = DELETE")  # so that the copy is one file, without a log
        found = copy.execute("PRAGMA integrity_check").fetchone()[0]
        if found != "ok":
            raise SchemaError(
                f"the database is damaged, and so would be its backup ({found}): see `.recover` of sqlite3"
            )


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _take_alone(connection: sqlite3.Connection) -> bool:
    """Reserve the file for this connection from its next transaction on. Return False if another process has the file open:
    only the last process can remove the log."""
    try:
        connection.execute("PRAGMA journal_mode = DELETE")
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
            raise
        return False
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    connection.execute("PRAGMA synchronous = FULL")  # without the log a lower setting is not safe
    return True


@contextmanager
def _transaction(connection: sqlite3.Connection, kind: str = "IMMEDIATE") -> Iterator[None]:
    connection.execute(f"BEGIN {kind}")
    try:
        yield
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    if connection.in_transaction:
        connection.execute("COMMIT")
