"""`PostgresKeeper`: looks after one schema of a PostgreSQL database.

The invariant: a copy is one snapshot, and a schema is filled in one transaction: both are whole or not there.

A copy is an SQLite store, since both databases have the same tables: every command reads it, and it can fill either.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from lightning.errors import DataError, SchemaError, StoreError
from lightning.maintenance import queries
from lightning.maintenance.files import new_file
from lightning.maintenance.keeper import Status, Weight, count_tokens
from lightning.store.relational.schema import MIGRATIONS as SQLITE_MIGRATIONS
from lightning.store.sqlite.connection import Settings as SqliteSettings
from lightning.store.sqlite.connection import connect as connect_sqlite
from lightning.store.sqlite.connection import translate as translate_sqlite
from lightning.store.sqlite.migrations import migrate as migrate_sqlite
from lightning.store.sqlite.migrations import refuse_foreign
from lightning.store.url import redacted

from lightning_postgres import failures
from lightning_postgres.connection import PostgresTransaction, connect
from lightning_postgres.migrations import MIGRATIONS
from lightning_postgres.settings import from_url
from lightning_postgres.store import PostgresStore

T = TypeVar("T")
BATCH: Final = 500
"""Rows on their way at once."""
PATIENCE: Final = 3600.0
"""Seconds that one statement may take: counting and cleaning up read whole tables."""
_TABLES: Final = "SELECT tablename FROM pg_tables WHERE schemaname = $1"
_BYTES: Final = (
    "SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint FROM pg_class c "
    "JOIN pg_namespace s ON s.oid = c.relnamespace WHERE c.relkind = 'r' AND s.nspname = $1"
)
_SNAPSHOT: Final = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_HAS_NUMBERS: Final = "SELECT table_name FROM information_schema.columns WHERE table_schema = $1 AND column_name = 'n'"


class PostgresKeeper:
    """The keeper of the schema that a `postgresql://` URL names."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._settings = from_url(url)

    async def schema(self) -> tuple[int, int]:
        """See `Keeper.schema`."""

        async def read(connection: Any, _: PostgresTransaction) -> int:
            tables = {row[0] for row in await connection.fetch(_TABLES, self._settings.schema)}
            version = await _schema(connection, tables)
            if version is None:
                raise self._nothing()
            return version

        return await self._reading(read), len(MIGRATIONS)

    async def status(self) -> Status:
        """See `Keeper.status`."""

        async def read(connection: Any, transaction: PostgresTransaction) -> Status:
            tables = {row[0] for row in await connection.fetch(_TABLES, self._settings.schema)}
            counts = {
                table: (await connection.fetchval(queries.count(table)) if table in tables else 0)
                for table in queries.COUNTED
            }
            empty = "runs" not in tables
            tokens = [] if empty else [tuple(row) for row in await transaction.all(queries.TOKENS)]
            activity = [] if empty else await transaction.all(queries.ACTIVITY)
            return Status(
                store=redacted(self._url),
                schema=await _schema(connection, tables),
                newest_schema=len(MIGRATIONS),
                bytes=await connection.fetchval(_BYTES, self._settings.schema),
                runs=counts["runs"],
                rollouts={} if empty else {row[0]: row[1] for row in await transaction.all(queries.BY_STATUS)},
                calls=counts["transitions"],
                spans=counts["spans"],
                steps=counts["steps"],
                resources=counts["resources"],
                tokens=count_tokens(tokens, await transaction.now()),
                oldest=None if empty else await connection.fetchval(queries.FIRST_RUN),
                newest=max((row[1] for row in activity), default=None),
            )

        return await self._reading(read)

    async def backup(self, target: Path) -> None:
        """See `Keeper.backup`."""

        async def copy(connection: Any, _: PostgresTransaction) -> None:
            tables = await self._tables(connection)
            with new_file(target) as unfinished, closing(_new_sqlite(unfinished)) as made:
                for table in tables:
                    await _copy_out(connection, made, table)
                made.execute("PRAGMA journal_mode = DELETE")

        await self._reading(copy)

    async def restore(self, source: Path) -> None:
        """See `Keeper.restore`."""
        with _old_sqlite(source) as file:
            store = PostgresStore(self._settings)
            await store.open()
            await store.close()

            async def fill(connection: Any, _: PostgresTransaction) -> None:
                tables = await self._tables(connection)
                for table in tables:
                    if await connection.fetchval(f"SELECT EXISTS (SELECT 1 FROM {table})"):  # noqa: S608 — a name of ours
                        raise StoreError(
                            f"{redacted(self._url)} is not empty (table {table}): restore into another ?schema="
                        )
                    await _copy_in(file, connection, table, self._settings.schema)
                for row in await connection.fetch(_HAS_NUMBERS, self._settings.schema):
                    await connection.execute(_after_the_last(row[0]))

            await self._writing(fill)

    async def activity(self) -> dict[str, float]:
        """See `Keeper.activity`."""
        rows = await self._reading(lambda _, transaction: transaction.all(queries.ACTIVITY))
        return {row[0]: row[1] for row in rows}

    async def busy_runs(self) -> frozenset[str]:
        """See `Keeper.busy_runs`."""
        return await self._reading(lambda _, transaction: _busy(transaction))

    async def weigh(self, run: str, groups: Sequence[str]) -> list[Weight]:
        """See `Keeper.weigh`."""

        async def read(_: Any, transaction: PostgresTransaction) -> list[Weight]:
            found = []
            for group in groups:
                calls, size = await transaction.one(queries.WEIGH_CALLS, (run, group)) or (0, 0)
                (spans,) = await transaction.one(queries.WEIGH_SPANS, (run, group)) or (0,)
                found.append(Weight(calls, spans, int(size)))
            return found

        return await self._reading(read)

    async def forget_calls(self, run: str, groups: Sequence[str]) -> None:
        """See `Keeper.forget_calls`. A transaction for each group."""
        for group in groups:

            async def remove(_: Any, transaction: PostgresTransaction, group: str = group) -> None:
                await transaction.alone(
                    f"rollouts {run}"
                )  # a rollout that is created now comes after this, with its calls
                (unended,) = await transaction.one(queries.UNENDED, (run, group)) or (0,)
                if not unended:
                    for statement in queries.FORGET_CALLS:
                        await transaction.run(statement, (run, group))

            await self._writing(remove)

    async def forget_run(self, run: str) -> None:
        """See `Keeper.forget_run`."""

        async def remove(connection: Any, transaction: PostgresTransaction) -> None:
            await transaction.alone(f"rollouts {run}")
            # In the order of those who append: nobody does from here on.
            rollouts = {row[0] for row in await transaction.locked(queries.ROLLOUTS, (run,))}
            if run in await _busy(transaction):
                raise StoreError(f"somebody works on run {run!r}: end its trainer and its runners first")
            tables = await self._tables(connection)
            for statement in queries.FORGET_RUN:
                if statement.split()[2] in tables:
                    await transaction.run(statement, (run,))
            state = {row[0]: row[1] for row in await transaction.all(queries.UNNAMED_STATE)}
            left = [("", name) for name in queries.fleet_state(run, state)]
            traces = [(row[0], row[1]) for row in await transaction.all(queries.TRACES)]
            left += [(queries.TRACES_RUN, name) for name in queries.traces_of(rollouts, traces)]
            await transaction.many(queries.FORGET_STATE, left)

        await self._writing(remove)

    async def vacuum(self) -> str:
        """See `Keeper.vacuum`. The space is used again for what is written next; `VACUUM FULL` would stop every writer."""

        async def clear(_: Any, transaction: PostgresTransaction) -> None:
            # Notices before runs: whoever announces one has put the run before.
            state = {row[0]: row[1] for row in await transaction.all(queries.UNNAMED_STATE)}
            runs = {row[0] for row in await transaction.all(queries.RUNS)}
            await transaction.many(queries.FORGET_STATE, [("", name) for name in queries.empty_seats(state, runs)])
            await transaction.run(queries.FORGET_OLD_ANSWERS, (await transaction.now(),))

        async with self._connected() as connection:
            tables = await self._tables(connection)
            await _forget_old_traces(PostgresTransaction(connection, self._settings))
        await self._writing(clear)
        async with self._connected() as connection:
            for table in tables:
                await connection.execute(f"VACUUM (ANALYZE) {table}")
        return ""

    # connections ------------------------------------------------------------------------------------------------
    async def _tables(self, connection: Any) -> list[str]:
        """The tables to look after. Raises `SchemaError` for a schema that is missing or not this release's."""
        tables = {row[0] for row in await connection.fetch(_TABLES, self._settings.schema)}
        version = await _schema(connection, tables)
        if version is None:
            raise self._nothing()
        if version != len(MIGRATIONS):
            raise SchemaError(
                f"{redacted(self._url)} has schema version {version}, this release works on {len(MIGRATIONS)}: "
                "run `lightning db upgrade --no-backup` with this release or a newer one"
            )
        return [table for table in queries.TABLES if table in tables]

    def _nothing(self) -> SchemaError:
        return SchemaError(f"{redacted(self._url)} holds no store: check ?schema= in the URL")

    async def _reading(self, operation: Callable[[Any, PostgresTransaction], Awaitable[T]]) -> T:
        return await self._transact(_SNAPSHOT, operation)

    async def _writing(self, operation: Callable[[Any, PostgresTransaction], Awaitable[T]]) -> T:
        return await self._transact("BEGIN", operation)

    async def _transact(self, begin: str, operation: Callable[[Any, PostgresTransaction], Awaitable[T]]) -> T:
        async with self._connected() as connection:
            await connection.execute(begin)
            result = await operation(connection, PostgresTransaction(connection, self._settings))
            await connection.execute("COMMIT")
            return result

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Any]:
        """A connection of one's own; what was not committed on it is not done."""
        connection: Any = None
        try:
            connection = await connect(self._settings, statement_seconds=PATIENCE)
            yield connection
        except Exception as error:
            refused = failures.translate(error, self._settings)
            if refused is error:
                raise
            raise refused from error
        finally:
            if connection is not None:
                connection.terminate()


async def _schema(connection: Any, tables: set[str]) -> int | None:
    version: int | None = None
    if "schema_version" in tables:
        version = await connection.fetchval("SELECT version FROM schema_version")
    return version


async def _busy(transaction: PostgresTransaction) -> frozenset[str]:
    return frozenset(row[0] for row in await transaction.all(queries.BUSY, (await transaction.now(),)))


async def _forget_old_traces(statements: PostgresTransaction) -> None:
    """Each statement is committed by itself."""
    after, now = "", await statements.now()
    while traces := await statements.all(queries.TRACES_AFTER, (after, queries.TRACES_AT_ONCE)):
        rollouts = sorted({queries.trace_of(row[1])[0] for row in traces})
        there = {row[0] for row in await statements.all(queries.which_are_there(rollouts), rollouts)}
        await statements.many(
            queries.FORGET_STATE, queries.old_traces([(row[0], row[1]) for row in traces], there, now)
        )
        after = traces[-1][0]


def _new_sqlite(path: Path) -> sqlite3.Connection:
    """An empty store in a new file, in a transaction."""
    settings = SqliteSettings(str(path))
    connection = connect_sqlite(settings)
    migrate_sqlite(connection, settings)
    connection.execute("PRAGMA synchronous = OFF")  # the whole file is synced when it is complete
    return connection


@contextmanager
def _old_sqlite(path: Path) -> Iterator[sqlite3.Connection]:
    """A store to read from. Raises `SchemaError` unless it has this release's schema."""
    settings = SqliteSettings(str(path))
    try:
        refuse_foreign(settings)
        with closing(connect_sqlite(settings, read_only=True)) as connection:
            if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'schema_version'").fetchone():
                raise SchemaError(f"{path} is empty, not a store: give a backup or the database file of a run")
            (version,) = connection.execute("SELECT version FROM schema_version").fetchone()
            if version != len(SQLITE_MIGRATIONS):
                raise SchemaError(f"{path} has schema version {version}: run `lightning db upgrade {path}` first")
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
    batch: list[tuple[Any, ...]] = []
    made.execute("BEGIN")
    async for row in connection.cursor(select, prefetch=BATCH):
        batch.append(tuple(row))
        if len(batch) == BATCH:
            await asyncio.to_thread(made.executemany, insert, batch)
            batch = []
    made.executemany(insert, batch)
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
    """New rows are numbered from the last copied one on."""
    return f"SELECT setval(pg_get_serial_sequence('{table}', 'n'), coalesce(max(n), 0) + 1, false) FROM {table}"  # noqa: S608
