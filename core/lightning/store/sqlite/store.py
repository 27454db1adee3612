"""`SqliteStore`: the `Store` protocol over one writer thread and a few readers beside it, and its watch of changes.

The invariant: methods may be awaited from any event loop and any thread of the process that opened the store; a write that was
awaited is committed, and every later read sees it.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, TypeVar

from lightning.errors import ConfigError
from lightning.store.relational.store import RelationalStore
from lightning.store.relational.transaction import Again, Operation, Transaction
from lightning.store.sqlite.connection import MEMORY, Settings, SqliteTransaction, Writer, connect, drive, translate
from lightning.store.threads import Bell, LookingWatch, check_process, closed_error
from lightning.store.url import StoreURL, parse

SELECT_REVISION: Final = "SELECT n FROM revisions WHERE run = ?"
POLL: Final = 0.05
"""Seconds between looks for what another process changed; a look is one indexed read."""


async def revision(transaction: Transaction, run: str) -> int:
    """How often the run has changed."""
    row = await transaction.one(SELECT_REVISION, (run,))
    return int(row[0]) if row else 0


T = TypeVar("T")
READERS: Final = 8
"""A scan of a large run takes seconds: that many at once do not keep a short read waiting."""


class _Readers:
    """A few threads, each with its own connection, that read committed snapshots while the writer writes."""

    def __init__(self, settings: Settings, writer: Writer) -> None:
        self._settings, self._writer = settings, writer
        self._local = threading.local()
        self._lock = threading.Lock()
        self._connections: list[sqlite3.Connection] = []
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="lightning-store-reader")

    def submit(self, operation: Operation[T]) -> Future[T]:
        return self._pool.submit(self._read, operation)

    def _read(self, operation: Operation[T]) -> T:
        connection = self._connection()
        try:
            connection.execute("BEGIN")
            try:
                return drive(operation(SqliteTransaction(connection)))
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
        except Exception as error:
            refused = translate(error, self._settings)
            if refused is error:
                raise
            raise refused from error

    def _connection(self) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = connect(self._settings, read_only=True, opened=self._writer.identity)
            with self._lock:
                self._connections.append(connection)
        return connection

    def close(self) -> None:
        self._pool.shutdown(wait=True)
        for connection in self._connections:
            connection.close()


class SqliteStore(RelationalStore):
    """A store in the SQLite file `path`, which is created with its folder if it is missing.

    `sync="full"` makes acknowledged writes survive a power cut as well as the death of every process; `busy_timeout` is how
    many seconds to wait for another process that writes. Raises `ConfigError` for settings that cannot be meant.
    """

    answers_get_lost = False

    def __init__(self, path: str | Path, *, sync: str = "normal", busy_timeout: float = 30.0) -> None:
        super().__init__()
        place = str(path) if str(path) == MEMORY else str(Path(path).absolute())  # wherever the process goes
        self._settings = Settings(place, sync, busy_timeout)
        self._lock = threading.Lock()
        self._writer: Writer | None = None
        self._readers: _Readers | None = None
        self._bell = Bell()
        self._process = 0

    @classmethod
    def from_url(cls, url: str | StoreURL) -> SqliteStore:
        """`sqlite:///relative.db`, `sqlite:////absolute.db`, with `?sync=full` and `?busy_timeout=SECONDS`."""
        where = parse(url) if isinstance(url, str) else url
        where.check_options(("sync", "busy_timeout"))
        if where.host or where.path in ("", MEMORY):
            raise ConfigError(
                f"{url!r} names no file: write sqlite:///relative.db (three slashes) or sqlite:////absolute.db (four), "
                "or memory:// for a store that is not kept"
            )
        try:
            busy_timeout = float(where.options.get("busy_timeout", "30"))
        except ValueError as error:
            raise ConfigError(f"busy_timeout in {url!r} must be a number of seconds") from error
        return cls(where.path, sync=where.options.get("sync", "normal"), busy_timeout=busy_timeout)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._settings.path!r})"

    async def open(self, *, make: bool = True) -> None:
        """See `Store.open`."""
        with self._lock:
            if self._writer is not None and self._process != os.getpid():
                _inherited.append((self._writer, self._readers))
                self._writer, self._readers, self._bell = None, None, Bell()
            if self._writer is None:
                self._writer = Writer(self._settings, self._bell, make)
                self._readers = None if self._settings.in_memory else _Readers(self._settings, self._writer)
                self._process = os.getpid()
                self._with_tables.clear()
            writer = self._writer
        try:
            await asyncio.wrap_future(writer.ready)
        except Exception:
            await self._disconnect(writer)
            raise

    async def close(self) -> None:
        """See `Store.close`."""
        if self._writer is not None:
            await self._disconnect(self._writer)

    async def _disconnect(self, writer: Writer) -> None:
        with self._lock:
            if self._writer is not writer:  # someone else was faster, and may have opened the store again
                return
            readers = self._readers
            self._writer = self._readers = None
        if self._process == os.getpid():
            await asyncio.to_thread(_close, writer, readers)
        else:
            _inherited.append((writer, readers))

    async def _write(
        self, operation: Operation[T], again: Again[T] | None = None, *, first: Callable[[], object] | None = None
    ) -> T:
        return await self._open_writer().submit(operation, first)

    async def _read(self, operation: Operation[T], *, whole: bool = False) -> T:
        writer, readers = self._open_writer(), self._readers
        # A private in-memory database has one connection: there, reads queue with the writes.
        if readers is None:
            return await writer.submit(operation)
        return await asyncio.wrap_future(readers.submit(operation))

    def _open_writer(self) -> Writer:
        writer = self._writer
        if writer is None:
            raise closed_error(self._settings.path)
        check_process(self._settings.path, self._process)
        return writer

    @asynccontextmanager
    async def watch(self, run: str) -> AsyncIterator[LookingWatch[int]]:
        """See `Store.watch`. Compares how often the run has changed."""

        def look() -> Awaitable[int]:
            return self._read(lambda tx: revision(tx, run))

        event = asyncio.Event()
        with self._bell.listening(run, event):
            yield LookingWatch(look, event, await look(), POLL)


_inherited: list[tuple[Writer, _Readers | None]] = []
"""Of the process that this one was forked from, kept unused: closing its connections could take the log from under it."""


def _close(writer: Writer, readers: _Readers | None) -> None:
    if readers is not None:
        readers.close()  # first: SQLite folds the log into the file when the last connection goes
    writer.close()
