"""`PostgresKeeper`: looks after one schema of a PostgreSQL database.

The invariant: a copy is one snapshot, and a schema is filled in one transaction, so that both are complete or do not exist.

A copy is an SQLite store, since both kinds of databases have the same tables. Every command reads it, and it can fill either
kind.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from lightning.errors import DataError, StoreError
from lightning.store.pages import batched
from lightning.store.relational.transaction import MADE, Operation, SqlPart, Transaction, make_tables
from lightning.store.sqlite.connection import Settings as SqliteSettings
from lightning.store.sqlite.connection import connect as connect_sqlite
from lightning.store.sqlite.connection import make_tables as make_sqlite_tables
from lightning.store.sqlite.connection import refuse_foreign
from lightning.store.sqlite.connection import translate as translate_sqlite
from lightning.store.sqlite.store import SqliteTransaction
from lightning.store.url import redacted
from lightning_db import queries
from lightning_db.export_files import new_file
from lightning_db.relational import RelationalKeeper, groups_in, parts

from lightning_postgres import failures
from lightning_postgres.connection import PostgresTransaction, connected
from lightning_postgres.settings import from_url
from lightning_postgres.store import PostgresStore

T = TypeVar("T")
BATCH: Final = 500
"""The number of rows that are copied at a time."""
PATIENCE: Final = 3600.0
"""The most seconds that a statement may take, because counting and cleaning up read whole tables."""
_TABLES: Final = "SELECT tablename FROM pg_tables WHERE schemaname = ?"
_BYTES: Final = (
    "SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint FROM pg_class c "
    "JOIN pg_namespace s ON s.oid = c.relnamespace WHERE c.relkind = 'r' AND s.nspname = ?"
)
_SNAPSHOT: Final = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_HAS_NUMBERS: Final = "SELECT table_name FROM information_schema.columns WHERE table_schema = $1 AND column_name = 'n'"


class PostgresKeeper(RelationalKeeper):
    """The keeper of the schema that a `postgresql://` URL names."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._settings = from_url(url)

    async def backup(self, target: Path) -> None:
        """Write one snapshot of the schema into the new SQLite file `target` (`Keeper.backup`)."""

        async def copy(connection: Any, transaction: PostgresTransaction) -> None:
            tables = await self._checked_tables(transaction)
            groups = await self._groups(transaction)
            with new_file(target) as unfinished, closing(_new_sqlite(unfinished)) as made:
                await _make_groups(SqliteTransaction(made), groups, redacted(self._url))
                for table in (*tables, *_tables_of(groups)):
                    await _copy_out(connection, made, table)
                made.execute("PRAGMA journal_mode = DELETE")

        await self._transact(_SNAPSHOT, copy)

    async def restore(self, source: Path) -> None:
        """Fill this schema, which must be new or empty, from an SQLite store (`Keeper.restore`)."""
        with _old_sqlite(source) as file:
            store = PostgresStore(self._settings)
            await store.open()
            await store.close()

            async def fill(connection: Any, transaction: PostgresTransaction) -> None:
                tables = await self._checked_tables(transaction)
                groups = await groups_in(SqliteTransaction(file), parts(), source)
                await _make_groups(transaction, groups, source)
                for table in (*tables, *_tables_of(groups)):
                    if await connection.fetchval(f"SELECT EXISTS (SELECT 1 FROM {table})"):  # noqa: S608 — a name of ours
                        raise StoreError(
                            f"{redacted(self._url)} is not empty (table {table}): restore into another ?schema="
                        )
                    await _copy_in(file, connection, table, self._settings.schema)
                for row in await connection.fetch(_HAS_NUMBERS, self._settings.schema):
                    await connection.execute(_after_the_last(row[0]))

            await self._transact("BEGIN", fill)

    async def _give_back(self) -> str:
        """Make free space usable for later rows, and return an empty text. `VACUUM FULL`, which gives the space back to the
        file system, would stop every writer."""
        tables = await self._read(self._checked_tables)
        tables += _tables_of(await self._read(self._groups))
        async with self._connected() as connection:
            for table in tables:
                await connection.execute(f"VACUUM (ANALYZE) {table}")
        return ""

    # connections ------------------------------------------------------------------------------------------------
    async def _tables(self, transaction: Transaction) -> set[str]:
        return {row[0] for row in await transaction.all(_TABLES, (self._settings.schema,))}

    async def _bytes(self, transaction: Transaction) -> int:
        (size,) = await transaction.one(_BYTES, (self._settings.schema,)) or (0,)
        return int(size)

    async def _checked_tables(self, transaction: Transaction) -> list[str]:
        """Return the existing tables among `queries.TABLES`. Raises `SchemaError` for a database of another schema."""
        await self._check(transaction)
        there = await self._tables(transaction)
        return [table for table in queries.TABLES if table in there]

    async def _read(self, operation: Operation[T]) -> T:
        return await self._transact(_SNAPSHOT, lambda _, transaction: operation(transaction))

    async def _write(self, operation: Operation[T], *, alone: bool = False) -> T:
        async def run(_: Any, transaction: PostgresTransaction) -> T:
            await self._check(transaction)
            return await operation(transaction)

        return await self._transact("BEGIN", run)

    async def _transact(self, begin: str, operation: Callable[[Any, PostgresTransaction], Awaitable[T]]) -> T:
        async with self._connected() as connection:
            await connection.execute(begin)
            result = await operation(connection, PostgresTransaction(connection, self._settings))
            await connection.execute("COMMIT")
            return result

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Any]:
        """A context with a new connection. Errors in it are raised as `failures.translate` gives them."""
        try:
            async with connected(self._settings, PATIENCE) as connection:
                yield connection
        except Exception as error:
            refused = failures.translate(error, self._settings)
            if refused is error:
                raise
            raise refused from error


async def _make_groups(transaction: Transaction, groups: Mapping[str, SqlPart], where: object) -> None:
    for name, part in groups.items():
        await make_tables(transaction, name, part.tables, where)


def _tables_of(groups: Mapping[str, SqlPart]) -> list[str]:
    """Return the tables of the groups, in the order in which they are made."""
    statements = (statement for part in groups.values() for step in part.tables for statement in step)
    found = filter(None, map(MADE.match, statements))
    return list(dict.fromkeys(each[2] for each in found if each[1].upper() == "TABLE"))


def _new_sqlite(path: Path) -> sqlite3.Connection:
    """Return a connection to an empty store in a new SQLite file."""
    settings = SqliteSettings(str(path))
    connection = connect_sqlite(settings)
    make_sqlite_tables(connection, settings)
    connection.execute("PRAGMA synchronous = OFF")  # the whole file is synced when it is complete
    return connection


@contextmanager
def _old_sqlite(path: Path) -> Iterator[sqlite3.Connection]:
    """A context with a reading transaction on an SQLite store. Raises `SchemaError` for a file that is no store or has another
    schema."""
    settings = SqliteSettings(str(path))
    try:
        refuse_foreign(settings, make=False)
        with closing(connect_sqlite(settings, read_only=True)) as connection:
            connection.execute("BEGIN")
            yield connection
    except sqlite3.Error as error:
        raise translate_sqlite(error, settings) from error


def _columns(connection: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]


async def _copy_out(connection: Any, made: sqlite3.Connection, table: str) -> None:
    names = _columns(made, table)
    places = ", ".join("?" * len(names))
    insert = f"INSERT INTO {table} ({', '.join(names)}) VALUES ({places})"  # noqa: S608 — names of ours
    select = f"SELECT {', '.join(names)} FROM {table}"  # noqa: S608 — likewise
    made.execute("BEGIN")
    async for rows in batched(aiter(connection.cursor(select, prefetch=BATCH)), BATCH):
        await asyncio.to_thread(made.executemany, insert, [tuple(row) for row in rows])
    made.execute("COMMIT")


async def _copy_in(file: sqlite3.Connection, connection: Any, table: str, schema: str) -> None:
    names = _columns(file, table)
    with closing(file.execute(f"SELECT {', '.join(names)} FROM {table}")) as rows:  # noqa: S608 — names of ours
        try:
            await connection.copy_records_to_table(table, records=rows, columns=names, schema_name=schema)
        except TypeError as error:
            raise DataError(
                f"a row of table {table} in the backup is damaged ({error}): take another backup"
            ) from error


def _after_the_last(table: str) -> str:
    """Return a statement that lets the numbers of new rows of a table begin behind the last copied row."""
    return f"SELECT setval(pg_get_serial_sequence('{table}', 'n'), coalesce(max(n), 0) + 1, false) FROM {table}"  # noqa: S608
