"""`SqliteKeeper`: looks after one SQLite file, of any schema up to this release's.

The invariant: a file is never brought forward here, and what is written beside it appears whole or not at all.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final, TypeVar

from lightning.errors import ConfigError, SchemaError, StoreError
from lightning.maintenance import queries
from lightning.maintenance.files import new_file
from lightning.maintenance.keeper import Status, Weight, count_tokens
from lightning.store.relational.schema import MIGRATIONS
from lightning.store.sqlite import SqliteStore
from lightning.store.sqlite.connection import Settings, connect, translate
from lightning.store.sqlite.migrations import refuse_foreign
from lightning.store.url import parse, sqlite_url

T = TypeVar("T")
_CLOCK: Final = "SELECT (julianday('now') - 2440587.5) * 86400.0"


class SqliteKeeper:
    """The keeper of the file that a `sqlite:///` URL names."""

    def __init__(self, url: str) -> None:
        where = parse(url)
        SqliteStore.from_url(where)  # refuses what cannot be meant
        self._url = url
        self._path = Path(where.path)
        self._settings = Settings(where.path, busy_timeout=float(where.options.get("busy_timeout", "30")))

    async def schema(self) -> tuple[int, int]:
        """See `Keeper.schema`."""
        return await self._read(_schema), len(MIGRATIONS)

    async def status(self) -> Status:
        """See `Keeper.status`."""
        return await self._read(self._status)

    async def backup(self, target: Path) -> None:
        """See `Keeper.backup`. SQLite's online backup, in one step: writers of other processes do not wait for it."""
        await self._read(lambda connection: copy_file(connection, target))

    async def restore(self, source: Path) -> None:
        """See `Keeper.restore`."""
        if self._path.exists():
            raise StoreError(
                f"{self._path} exists already: restore into a file that does not, and rename it afterwards"
            )
        await SqliteKeeper(sqlite_url(source)).backup(self._path)

    async def activity(self) -> dict[str, float]:
        """See `Keeper.activity`."""
        return await self._read(lambda connection: dict(connection.execute(queries.ACTIVITY)))

    async def busy_runs(self) -> frozenset[str]:
        """See `Keeper.busy_runs`."""
        return await self._read(lambda connection: frozenset(_busy(connection)))

    async def weigh(self, run: str, groups: Sequence[str]) -> list[Weight]:
        """See `Keeper.weigh`."""

        def weight(connection: sqlite3.Connection, group: str) -> Weight:
            calls, size = connection.execute(queries.WEIGH_CALLS, (run, group)).fetchone()
            (spans,) = connection.execute(queries.WEIGH_SPANS, (run, group)).fetchone()
            return Weight(calls, spans, size)

        return await self._read(lambda connection: [weight(connection, group) for group in groups])

    async def forget_calls(self, run: str, groups: Sequence[str]) -> None:
        """See `Keeper.forget_calls`. A transaction for each group: whoever writes meanwhile waits for one of them at most."""

        def remove(connection: sqlite3.Connection) -> None:
            for group in groups:
                with _transaction(connection):
                    if not connection.execute(queries.UNENDED, (run, group)).fetchone()[0]:
                        for statement in queries.FORGET_CALLS:
                            connection.execute(statement, (run, group))

        await self._write(remove)

    async def forget_run(self, run: str) -> None:
        """See `Keeper.forget_run`. Nobody else may have the file open.

        SQLite gives the number of a removed row to a new one, and a process that appends remembers attempts by the numbers of
        their rollouts.
        """

        def remove(connection: sqlite3.Connection) -> None:
            if not _take_alone(connection):
                raise StoreError(
                    f"{self._path} is open in another process: end the trainers, servers and commands that use it first"
                )
            with _transaction(connection):
                if run in _busy(connection):
                    raise StoreError(f"somebody works on run {run!r}: end its trainer and its runners first")
                rollouts = {rollout for (rollout,) in connection.execute(queries.ROLLOUTS, (run,))}
                for statement in queries.FORGET_RUN:
                    connection.execute(statement, (run,))
                state = dict(connection.execute(queries.UNNAMED_STATE))
                left = [("", name) for name in queries.fleet_state(run, state)]
                traces = connection.execute(queries.TRACES).fetchall()
                left += [(queries.TRACES_RUN, name) for name in queries.traces_of(rollouts, traces)]
                connection.executemany(queries.FORGET_STATE, left)

        await self._write(remove)

    async def vacuum(self) -> str:
        """See `Keeper.vacuum`. `VACUUM` keeps everybody else from writing for as long as it takes, minutes for a large file: so
        the file shrinks only while nobody else has it open."""

        def rewrite(connection: sqlite3.Connection) -> str:
            (now,) = connection.execute(_CLOCK).fetchone()
            _forget_old_traces(connection, now)
            with _transaction(connection):
                state = dict(connection.execute(queries.UNNAMED_STATE))
                runs = {run for (run,) in connection.execute(queries.RUNS)}
                left = [("", name) for name in queries.empty_seats(state, runs)]
                connection.executemany(queries.FORGET_STATE, left)
                connection.execute(queries.FORGET_OLD_ANSWERS, (now,))
            if not connection.execute("PRAGMA freelist_count").fetchone()[0]:
                return ""
            if not _take_alone(connection):
                return (
                    f"{self._path} keeps its size, since it is open in another process: what is written next uses the space. "
                    "The same command makes it smaller once nobody else has it open"
                )
            connection.execute("VACUUM")
            return ""

        return await self._write(rewrite)

    # the file ---------------------------------------------------------------------------------------------------
    def _status(self, connection: sqlite3.Connection) -> Status:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        counts = {
            table: connection.execute(queries.count(table)).fetchone()[0] if table in tables else 0
            for table in queries.COUNTED
        }
        now = connection.execute(_CLOCK).fetchone()[0]
        tokens = list(connection.execute(queries.TOKENS)) if "tokens" in tables else []
        log = Path(f"{self._path}-wal")
        return Status(
            store=self._url,
            schema=_schema(connection),
            newest_schema=len(MIGRATIONS),
            bytes=self._path.stat().st_size + (log.stat().st_size if log.exists() else 0),
            runs=counts["runs"],
            rollouts=dict(connection.execute(queries.BY_STATUS)),
            calls=counts["transitions"],
            spans=counts["spans"],
            steps=counts["steps"],
            resources=counts["resources"],
            tokens=count_tokens(tokens, now),
            oldest=connection.execute(queries.FIRST_RUN).fetchone()[0],
            newest=max((at for _, at in connection.execute(queries.ACTIVITY)), default=None),
        )

    async def _read(self, operation: Callable[[sqlite3.Connection], T]) -> T:
        """Run an operation in one reading transaction."""

        def run() -> T:
            with closing(self._open(read_only=True)) as connection, _transaction(connection, "DEFERRED"):
                return operation(connection)

        return await self._translated(run)

    async def _write(self, operation: Callable[[sqlite3.Connection], T]) -> T:
        """Run an operation that makes transactions of its own; the file must have this release's schema."""

        def run() -> T:
            with closing(self._open(read_only=False)) as connection:
                version = _schema(connection)
                if version != len(MIGRATIONS):
                    raise SchemaError(
                        f"{self._path} has schema version {version}, this command works on {len(MIGRATIONS)}: "
                        f"run `lightning db upgrade {self._path}` first"
                    )
                return operation(connection)

        return await self._translated(run)

    async def _translated(self, operation: Callable[[], T]) -> T:
        try:
            return await asyncio.to_thread(operation)
        except (sqlite3.Error, OSError) as error:
            raise translate(error, self._settings) from error

    def _open(self, *, read_only: bool) -> sqlite3.Connection:
        if not self._path.is_file():
            raise ConfigError(f"there is no database at {str(self._path)!r}")
        refuse_foreign(self._settings)
        return connect(self._settings, read_only=read_only)


def copy_file(source: sqlite3.Connection, target: Path) -> None:
    """A copy of a database in a new file, as it is in this connection's transaction. Raises `StoreError` for what exists."""
    with new_file(target) as unfinished, closing(sqlite3.connect(unfinished, isolation_level=None)) as copy:
        source.backup(copy)
        copy.execute("PRAGMA journal_mode = DELETE")  # one file that can be carried away
        found = copy.execute("PRAGMA integrity_check").fetchone()[0]
        if found != "ok":
            raise SchemaError(
                f"the database is damaged, and so would be its backup ({found}): see `.recover` of sqlite3"
            )


def _schema(connection: sqlite3.Connection) -> int:
    """The version of the schema; 0 while the file is empty."""
    if connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'schema_version'").fetchone()[0] == 0:
        return 0
    return int(connection.execute("SELECT version FROM schema_version").fetchone()[0])


def _take_alone(connection: sqlite3.Connection) -> bool:
    """Have the file for this connection alone from its next transaction on. False while another process has it open: the log
    can be given up only by the last who uses it."""
    try:
        connection.execute("PRAGMA journal_mode = DELETE")
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
            raise
        return False
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    connection.execute("PRAGMA synchronous = FULL")  # less is safe with the log alone
    return True


def _forget_old_traces(connection: sqlite3.Connection, now: float) -> None:
    """Looks for them outside of the transactions that remove them, which are short: others write meanwhile."""
    after = ""
    while traces := connection.execute(queries.TRACES_AFTER, (after, queries.TRACES_AT_ONCE)).fetchall():
        rollouts = sorted({queries.trace_of(value)[0] for _, value in traces})
        there = {rollout for (rollout,) in connection.execute(queries.which_are_there(rollouts), rollouts)}
        if old := queries.old_traces(traces, there, now):
            with _transaction(connection):
                connection.executemany(queries.FORGET_STATE, old)
        after = traces[-1][0]


def _busy(connection: sqlite3.Connection) -> list[str]:
    now = connection.execute(_CLOCK).fetchone()[0]
    return [run for (run,) in connection.execute(queries.BUSY, (now,))]


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
