"""`SqliteStore`: the `Store` protocol over one writing thread and a few reading threads, with the transaction object that
operations get and the watch of changes.

The invariant: methods may be awaited from any event loop and any thread of the process that opened the store. A write that was
awaited is committed, and every later read sees it. Operations that wait at the same time are committed in one transaction. A
future is resolved only after the transaction with its operation is committed. An operation that fails does not undo the others
of its transaction.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sqlite3
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from lightning.errors import ConfigError
from lightning.store.codec import ParentCache
from lightning.store.relational.store import RelationalStore
from lightning.store.relational.transaction import Operation, Transaction
from lightning.store.rows import Row, Value
from lightning.store.sqlite.connection import (
    MEMORY,
    Settings,
    connect,
    is_busy,
    make_tables,
    moved,
    refuse_foreign,
    translate,
    warn_of_shared,
)
from lightning.store.threads import Bell, LookingWatch, WorkItem, check_process, closed_error, deliver
from lightning.store.url import StoreURL, parse

T = TypeVar("T")
LOOK: Final = 0.05
"""Seconds between looks for changes by another process; a look is one indexed read."""


async def revision(transaction: Transaction, run: str) -> int:
    """Return how often the run has changed."""
    row = await transaction.one("SELECT n FROM revisions WHERE run = ?", (run,))
    return int(row[0]) if row else 0


class SqliteTransaction:
    """A `Transaction` whose coroutines never suspend, so that `drive` can run them. It belongs to one thread.

    A write transaction holds SQLite's only write lock from its beginning, so nothing that it reads changes until its end.
    """

    def __init__(self, connection: sqlite3.Connection, parents: ParentCache[int] | None = None) -> None:
        self._connection = connection
        self._now: float | None = None
        self._parents = parents
        self.changed_runs: set[str] = set()

    async def changed(self, run: str) -> None:
        """Tell the watches of a run (`Transaction.changed`). The writer counts the changes at the commit, also those of
        operations that were rolled back: a watch may wake without a change."""
        self.changed_runs.add(run)

    async def now(self) -> float:
        """Return the Unix time by the database's clock (`Transaction.now`)."""
        if self._now is None:
            self._now = float(self._connection.execute("SELECT (julianday('now') - 2440587.5) * 86400.0").fetchone()[0])
        return self._now

    @property
    def parents(self) -> ParentCache[int]:
        """The cache of possible parents of a new call (`Transaction.parents`)."""
        assert self._parents is not None, "a reading transaction does not append"
        return self._parents

    async def one(self, sql: str, values: Sequence[Value] = ()) -> Row | None:
        """Return the first row, or None without rows (`Transaction.one`)."""
        rows = self._connection.execute(sql, values).fetchall()
        return rows[0] if rows else None

    async def all(self, sql: str, values: Sequence[Value] = ()) -> list[Row]:
        """Return all rows (`Transaction.all`)."""
        return self._connection.execute(sql, values).fetchall()

    locked = free = all  # noqa: A003 — the method

    async def kept(self, sql: str, values: Sequence[Value] = ()) -> bool:
        """Return whether there is a row, and keep it from being removed (`Transaction.kept`)."""
        return await self.one(sql, values) is not None

    async def alone(self, *names: str) -> None:
        """Do nothing: every write of SQLite is alone (`Transaction.alone`)."""

    async def run(self, sql: str, values: Sequence[Value] = ()) -> int:
        """Execute a statement and return how many rows it changed (`Transaction.run`)."""
        return self._connection.execute(sql, values).rowcount

    async def define(self, sql: str) -> None:
        """Execute a statement that makes or changes a table (`Transaction.define`)."""
        self._connection.execute(sql)

    async def many(self, sql: str, rows: Sequence[Sequence[Value]]) -> None:
        """Execute a statement once for each row of values (`Transaction.many`)."""
        if rows:
            self._connection.executemany(sql, rows)

    async def insert(self, sql: str, values: Sequence[Value]) -> int | None:
        """Insert one row and return its `n`; None if it exists (`Transaction.insert`)."""
        done = self._connection.execute(sql, values)
        return done.lastrowid if done.rowcount else None

    async def insert_new(self, sql: str, rows: Sequence[Sequence[Value]]) -> int:
        """Insert the rows that do not exist and return how many they are (`Transaction.insert_new`)."""
        return max(self._connection.executemany(sql, rows).rowcount, 0)


def drive(operation: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine over a `SqliteTransaction` to its end, without an event loop, and return its result."""
    try:
        operation.send(None)
    except StopIteration as end:
        return cast("T", end.value)
    operation.close()
    raise AssertionError("an operation of a store awaits nothing but its transaction")


def identity(settings: Settings) -> tuple[int, int]:
    """Return the device and the inode of the store's file, which tell it from another file at the same path. Raises
    `StoreError` if there is no file."""
    try:
        found = os.stat(settings.path)  # noqa: PTH116 — at each commit
    except OSError as error:
        raise moved(settings) from error
    return found.st_dev, found.st_ino


def check_identity(settings: Settings, opened: tuple[int, int] | None) -> None:
    """Raise `StoreError` if the file that was `opened` is no longer at the path: a write would be lost. None, for a database in
    memory, is not checked."""
    if opened is not None and identity(settings) != opened:
        raise moved(settings)


def connect_again(settings: Settings, opened: tuple[int, int] | None, *, read_only: bool = False) -> sqlite3.Connection:
    """Return another connection to the file that was `opened`. Raises `StoreError` if the file is no longer at its path."""
    check_identity(settings, opened)
    return connect(settings, read_only=read_only, again=opened is not None)


MAX_GROUP: Final = 512
"""The most operations in one transaction, which bounds how long the first of them waits."""
GROUP_SECONDS: Final = 0.03
"""Seconds after which a transaction takes no more operations, because other processes wait for its end."""
POLL: Final = 0.0005
"""Seconds between two tries to begin a transaction while another process writes. SQLite has no queue of waiting processes. Its
own busy handler sleeps for up to 0.1 s, and a process that writes all the time takes the lock again within a millisecond."""

NEVER_WAIT: Final = "PRAGMA busy_timeout = 0"
"""Set for the writing connection, because the writer itself waits for other processes, up to each operation's deadline."""


class _Job(WorkItem[T]):
    """An operation for the writing thread. It may run twice, but it is committed once.

    The thread calls `first` before the transaction. The operation fails if its transaction cannot begin before the `deadline`,
    in seconds of the monotonic clock.
    """

    def __init__(self, operation: Operation[T], first: Callable[[], object] | None, deadline: float) -> None:
        super().__init__()
        self._operation = operation
        self.first = first
        self.deadline = deadline

    def run(self, transaction: SqliteTransaction) -> None:
        """Run the operation and keep its result. Raises the operation's error."""
        self.error = None
        self.result = drive(self._operation(transaction))


class Writer:
    """The writing thread and its connection. `ready` is resolved when the file is open and has its tables; it fails with the
    reason if that fails."""

    def __init__(self, settings: Settings, bell: Bell, make: bool) -> None:
        self._settings = settings
        self._bell = bell
        self._make = make
        self._jobs: queue.SimpleQueue[_Job[object] | None] = queue.SimpleQueue()
        self._waiting: deque[_Job[object]] = deque()
        self._lock = threading.Lock()
        self._closed = False
        self._stop = False
        self._broken = False
        self.identity: tuple[int, int] | None = None
        """The device and inode of the opened file; None for a database in memory."""
        self._parents = ParentCache[int]()
        self.ready: Future[None] = Future()
        self.ready.set_running_or_notify_cancel()  # one caller that gives up must not cancel the others' wait
        self._thread = threading.Thread(target=self._main, name="lightning-store-writer", daemon=True)
        self._thread.start()

    def submit(self, operation: Operation[T], first: Callable[[], object] | None = None) -> asyncio.Future[T]:
        """Queue an operation, with the function to call `first`, and return a future of the running loop. Raises `StoreError`
        after `close`."""
        job = _Job(operation, first, time.monotonic() + self._settings.busy_timeout)
        with self._lock:
            if self._closed:
                raise closed_error(self._settings.path)
            self._jobs.put(job)  # type: ignore[arg-type]  # the queue does not look at results
        return job.waiter

    def close(self) -> None:
        """Commit the queued operations, then close the file. Blocks until that is done; idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        self._thread.join()

    def _main(self) -> None:
        try:
            refuse_foreign(self._settings, make=self._make)
            self._connection = connect(self._settings)
        except Exception as error:  # noqa: BLE001 — `open` raises it
            self._refuse(translate(error, self._settings))
            return
        try:
            make_tables(self._connection, self._settings)
            self._connection.execute(NEVER_WAIT)
            self.identity = None if self._settings.in_memory else identity(self._settings)
        except Exception as error:  # noqa: BLE001 — `open` raises it
            self._connection.close()
            self._refuse(translate(error, self._settings))
            return
        if not self._settings.in_memory:
            warn_of_shared(self._settings.path)
        self.ready.set_result(None)
        while self._receive(wait=True):
            self._commit_group()
        self._connection.close()

    def _refuse(self, error: Exception) -> None:
        with self._lock:
            self._closed = True
        self.ready.set_exception(error)

    def _receive(self, *, wait: bool) -> bool:
        """Move queued operations to those that wait for a transaction, after calling their `first`; operations whose caller was
        cancelled are left out. With `wait` block until there is one. Return False if none waits; with `wait` the writer then
        stops."""
        while not self._stop and len(self._waiting) < MAX_GROUP:
            try:
                job = self._jobs.get(block=wait and not self._waiting)
            except queue.Empty:
                break
            if job is None:
                self._stop = True
            elif not job.waiter.cancelled() and self._prepared(job):
                self._waiting.append(job)
        return bool(self._waiting)

    def _prepared(self, job: _Job[object]) -> bool:
        try:
            if job.first is not None:
                job.first()
        except Exception as error:  # noqa: BLE001 — it is raised to the caller
            job.error = error
            deliver([job])
            return False
        return True

    def _commit_group(self) -> None:
        """Run the waiting operations in one transaction. If that transaction is lost, run each of them in its own."""
        group: list[_Job[object]] = []
        try:
            if not self._begin_for_waiting():
                return
            full = time.monotonic() + GROUP_SECONDS
            while self._waiting and time.monotonic() < full:
                job = self._waiting.popleft()
                if not job.waiter.cancelled():
                    group.append(job)
                    self._run_in_savepoint(job)
            self._commit()
        except Exception as error:  # noqa: BLE001 — the thread must go on: every caller waits for it
            self._roll_back()
            if not group and self._waiting:  # the transaction could not begin
                group.append(self._waiting.popleft())
            if len(group) == 1:
                group[0].error = translate(error, self._settings)
            else:
                for job in group:
                    self._commit_alone(job)
        deliver(group)

    def _run_in_savepoint(self, job: _Job[object]) -> None:
        self._connection.execute("SAVEPOINT job")
        try:
            job.run(self._transaction)
        except Exception as error:
            if not self._connection.in_transaction:
                raise  # SQLite rolled back everything by itself, as it may when the disk is full
            self._connection.execute("ROLLBACK TO job")
            self._parents.forget()
            job.error = translate(error, self._settings)
        self._connection.execute("RELEASE job")

    def _commit_alone(self, job: _Job[object]) -> None:
        try:
            self._begin(job.deadline)
            job.run(self._transaction)
            self._commit()
        except Exception as error:  # noqa: BLE001 — an operation's error belongs to its caller
            self._roll_back()
            job.error = translate(error, self._settings)

    def _begin_for_waiting(self) -> bool:
        """Begin a transaction for the waiting operations. Each operation whose deadline passes meanwhile fails. Return False if
        none is left."""
        while self._waiting:
            try:
                self._begin(self._waiting[0].deadline)
            except sqlite3.OperationalError as error:
                if not is_busy(error):
                    raise
                self._receive(wait=False)
                late = self._waiting.popleft()
                late.error = translate(error, self._settings)
                deliver([late])
            else:
                return True
        return False

    def _begin(self, deadline: float) -> None:
        """Begin a transaction. Raises `sqlite3.OperationalError` (busy) if other processes write until the deadline."""
        if self._broken:
            self._connection.close()
            self._connection = connect_again(self._settings, self.identity)
            self._connection.execute(NEVER_WAIT)
            self._broken = False
        while True:
            last = time.monotonic() >= deadline
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                break
            except sqlite3.OperationalError as error:
                if last or not is_busy(error):
                    raise
            time.sleep(POLL)
        self._transaction = SqliteTransaction(self._connection, self._parents)

    def _commit(self) -> None:
        check_identity(self._settings, self.identity)
        self._connection.executemany(
            "INSERT INTO revisions (run, n) VALUES (?, 1) ON CONFLICT (run) DO UPDATE SET n = revisions.n + 1",
            [(run,) for run in self._transaction.changed_runs],
        )
        self._connection.execute("COMMIT")
        self._parents.keep()
        self._bell.ring(self._transaction.changed_runs)

    def _roll_back(self) -> None:
        self._parents.forget()
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error:
            self._broken = True  # the next transaction gets a new connection


READERS: Final = 8
"""The number of reading threads, so that a few scans of large runs, which take seconds, do not keep a short read waiting."""


class _Readers:
    """The reading threads, each with its own connection. They read committed snapshots while the writer writes."""

    def __init__(self, settings: Settings, writer: Writer) -> None:
        self._settings, self._writer = settings, writer
        self._local = threading.local()
        self._connections: list[sqlite3.Connection] = []
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="lightning-store-reader")

    def submit(self, operation: Operation[T]) -> Future[T]:
        return self._pool.submit(self._read, operation)

    def _read(self, operation: Operation[T]) -> T:
        connection = self._connection()
        try:
            with connection:
                connection.execute("BEGIN")
                return drive(operation(SqliteTransaction(connection)))
        except Exception as error:
            refused = translate(error, self._settings)
            if refused is error:
                raise
            raise refused from error

    def _connection(self) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = connect_again(self._settings, self._writer.identity, read_only=True)
            self._local.connection = connection
            self._connections.append(connection)
        return connection

    def close(self) -> None:
        self._pool.shutdown(wait=True)
        for connection in self._connections:
            connection.close()


class SqliteStore(RelationalStore):
    """A store in the SQLite file `path`, which is created with its folder if it is missing.

    With `sync="full"` acknowledged writes survive a power cut as well as the death of every process. `busy_timeout` is the
    seconds to wait for another process that writes. Raises `ConfigError` for invalid settings.
    """

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
        """Make the store of a URL: `sqlite:///relative.db` or `sqlite:////absolute.db`, with the options `?sync=full` and
        `?busy_timeout=SECONDS`. Raises `ConfigError` for any other URL."""
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
        """Connect, and make the store if there is none (`Store.open`)."""
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
        """Write everything acknowledged and disconnect (`Store.close`)."""
        await self._disconnect(self._writer)

    async def _disconnect(self, writer: Writer | None) -> None:
        with self._lock:
            if (
                writer is None or self._writer is not writer
            ):  # another call was faster, and may have opened the store again
                return
            readers = self._readers
            self._writer = self._readers = None
        if self._process == os.getpid():
            await asyncio.to_thread(_close, writer, readers)
        else:
            _inherited.append((writer, readers))

    async def _write(self, operation: Operation[T], *, first: Callable[[], object] | None = None) -> T:
        result = await self._open_writer().submit(operation, first)
        self._has_written = True
        return result

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
        """Watch a run for changes (`Store.watch`), by comparing how often it has changed."""

        def look() -> Awaitable[int]:
            return self._read(lambda tx: revision(tx, run))

        event = asyncio.Event()
        with self._bell.listening(run, event):
            yield LookingWatch(look, event, await look(), LOOK)


_inherited: list[tuple[Writer, _Readers | None]] = []
"""The writers and readers of the process from which this one was forked. They are kept unused, because closing their
connections could remove the log that the other process uses."""


def _close(writer: Writer, readers: _Readers | None) -> None:
    if readers is not None:
        readers.close()  # first: SQLite folds the log into the file when the last connection goes
    writer.close()
