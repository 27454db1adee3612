"""Connections to one SQLite file of this schema, the transaction object that operations get, the thread that writes, and the
words for what SQLite refuses.

The invariant: no `sqlite3` exception leaves this package; each becomes an error that names the file and the cure. All tables
are made in one transaction; a file of another schema, or of another program, is refused untouched. Operations that wait
together are committed together: a future is resolved only after the transaction that holds its operation is committed, and an
operation that fails takes none of its neighbours with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import re
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from lightning.errors import ConfigError, DataError, LightningError, SchemaError, StoreError, UnavailableError
from lightning.store.codec import ParentCache
from lightning.store.relational.transaction import Operation
from lightning.store.rows import Row, Value
from lightning.store.schema import STATEMENTS, VERSION, check_version
from lightning.store.threads import Bell, WorkItem, closed_error, deliver

T = TypeVar("T")
MEMORY: Final = ":memory:"
PAGE_BYTES: Final = 16384
"""A transition is about 2 KB: pages this large waste little behind the last one that fits."""
WAL_LIMIT_BYTES: Final = 64 << 20
MARK_CHANGE: Final = "INSERT INTO revisions (run, n) VALUES (?, 1) ON CONFLICT (run) DO UPDATE SET n = revisions.n + 1"
_NOW: Final = "SELECT (julianday('now') - 2440587.5) * 86400.0"
_SYNC: Final = {"normal": "NORMAL", "full": "FULL"}


@dataclass(frozen=True, slots=True)
class Settings:
    """Where the file is and how hard it is held.

    `sync="normal"`: what was acknowledged survives the death of any process; a power cut may lose the last moments but
    never corrupts. `sync="full"`: it survives a power cut too, at an fsync per group commit. `busy_timeout`: seconds
    that an operation waits while another process writes, counted from when it was asked for.
    """

    path: str
    sync: str = "normal"
    busy_timeout: float = 30.0

    def __post_init__(self) -> None:
        if self.sync not in _SYNC:
            raise ConfigError(f"sync={self.sync!r} is not known for the sqlite store: use {' or '.join(_SYNC)}")
        if not 0 <= self.busy_timeout <= 3600:
            raise ConfigError(f"busy_timeout={self.busy_timeout!r} must be seconds between 0 and 3600")

    @property
    def in_memory(self) -> bool:
        """Whether the database is private to its one connection."""
        return self.path == MEMORY


class SqliteTransaction:
    """A `Transaction` whose coroutines never suspend, see `drive`. Belongs to one thread.

    A write begins with the one lock that SQLite has, so whatever it finds stays as it is.
    """

    def __init__(self, connection: sqlite3.Connection, parents: ParentCache[int] | None = None) -> None:
        self._connection = connection
        self._now: float | None = None
        self._parents = parents
        self.changed_runs: set[str] = set()
        self._marked: set[str] = set()

    async def changed(self, run: str) -> None:
        """See `Transaction.changed`."""
        if run not in self._marked:
            self._marked.add(run)
            self.changed_runs.add(run)
            self._connection.execute(MARK_CHANGE, (run,))

    def forget_changes(self) -> None:
        """A part of the transaction was undone, and perhaps the marks of its changes with it: mark anew from here on."""
        self._marked.clear()

    async def now(self) -> float:
        """See `Transaction.now`."""
        if self._now is None:
            self._now = float(self._connection.execute(_NOW).fetchone()[0])
        return self._now

    @property
    def parents(self) -> ParentCache[int]:
        """See `Transaction.parents`."""
        assert self._parents is not None, "a reading transaction does not append"
        return self._parents

    async def one(self, sql: str, values: Sequence[Value] = ()) -> Row | None:
        """See `Transaction.one`."""
        rows = self._connection.execute(sql, values).fetchall()
        return rows[0] if rows else None

    async def all(self, sql: str, values: Sequence[Value] = ()) -> list[Row]:
        """See `Transaction.all`."""
        return self._connection.execute(sql, values).fetchall()

    async def locked(self, sql: str, values: Sequence[Value] = ()) -> list[Row]:
        """See `Transaction.locked`."""
        return self._connection.execute(sql, values).fetchall()

    async def free(self, sql: str, values: Sequence[Value] = ()) -> list[Row]:
        """See `Transaction.free`."""
        return self._connection.execute(sql, values).fetchall()

    async def kept(self, sql: str, values: Sequence[Value] = ()) -> bool:
        """See `Transaction.kept`."""
        return await self.one(sql, values) is not None

    async def alone(self, *names: str) -> None:
        """See `Transaction.alone`: every write is."""

    async def run(self, sql: str, values: Sequence[Value] = ()) -> int:
        """See `Transaction.run`."""
        return self._connection.execute(sql, values).rowcount

    async def define(self, sql: str) -> None:
        """See `Transaction.define`."""
        self._connection.execute(sql)

    async def many(self, sql: str, rows: Sequence[Sequence[Value]]) -> None:
        """See `Transaction.many`."""
        if rows:
            self._connection.executemany(sql, rows)

    async def insert(self, sql: str, values: Sequence[Value]) -> int | None:
        """See `Transaction.insert`."""
        done = self._connection.execute(sql, values)
        return done.lastrowid if done.rowcount else None

    async def insert_new(self, sql: str, rows: Sequence[Sequence[Value]]) -> int:
        """See `Transaction.insert_new`."""
        return max(self._connection.executemany(sql, rows).rowcount, 0)


def drive(operation: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine over a `SqliteTransaction` to its end, here and now."""
    try:
        operation.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    operation.close()
    raise AssertionError("an operation of a store awaits nothing but its transaction")


Identity: TypeAlias = tuple[int, int] | None
"""Device and inode of the file that a store was opened with; None for one in memory."""


def identity(settings: Settings) -> Identity:
    """What tells the store's file from another at the same path. Raises `StoreError` where there is none."""
    if settings.in_memory:
        return None
    try:
        found = os.stat(settings.path)  # noqa: PTH116 — at each commit
    except OSError as error:
        raise moved(settings) from error
    return found.st_dev, found.st_ino


def check_identity(settings: Settings, opened: Identity) -> None:
    """Raise `StoreError` where another file than the one that was opened is at the path, or none: a write would be lost."""
    if identity(settings) != opened:
        raise moved(settings)


def moved(settings: Settings) -> StoreError:
    """The error for a file that is not at its path any more."""
    return StoreError(
        f"store {settings.path} was moved, removed or replaced while it was open, and nothing is written to it any more: put "
        "the file back together with the one that ends in -wal, or start again where they are now"
    )


def connect(settings: Settings, *, read_only: bool = False, opened: Identity = None) -> sqlite3.Connection:
    """Open the file in WAL mode, creating it and its folder. One that the store has `opened` before is not created: it must
    still be there. Raises `StoreError` or `SchemaError`."""
    if opened is not None:
        check_identity(settings, opened)
    elif not settings.in_memory:
        try:
            Path(settings.path).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"cannot create the folder of store {settings.path}: {error}. Choose another path"
            ) from error
    connection: sqlite3.Connection | None = None
    try:
        if not settings.in_memory and not read_only and opened is None:
            _make(settings.path)
        connection = sqlite3.connect(
            settings.path if opened is None else f"{Path(settings.path).as_uri()}?mode=rw",
            uri=opened is not None,
            timeout=settings.busy_timeout,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=256,
        )
        _configure(connection, settings, read_only=read_only)
    except OSError as error:
        raise StoreError(f"cannot create the store {settings.path}: {error}. Choose another path") from error
    except (sqlite3.Error, StoreError) as error:
        if connection is not None:
            connection.close()
        raise translate(error, settings) from error
    return connection


def _make(path: str) -> None:
    """Make the file, for its owner alone: it holds the secret that signs agents' keys. What is there stays as it is."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))


def _configure(connection: sqlite3.Connection, settings: Settings, *, read_only: bool) -> None:
    if read_only:
        connection.execute("PRAGMA query_only = ON")
        return
    connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    mode = _enter_wal(connection, settings)
    if mode != ("memory" if settings.in_memory else "wal"):
        raise StoreError(
            f"store {settings.path}: this file system does not support SQLite's write-ahead log (journal mode {mode!r}); "
            "put the file on a local disk"
        )
    connection.execute(f"PRAGMA synchronous = {_SYNC[settings.sync]}")
    connection.execute(f"PRAGMA journal_size_limit = {WAL_LIMIT_BYTES}")


def _enter_wal(connection: sqlite3.Connection, settings: Settings) -> str:
    """Switch to WAL; two processes that create the file at once make SQLite answer busy without waiting, so wait here."""
    deadline = time.monotonic() + settings.busy_timeout
    while True:
        try:
            return str(connection.execute("PRAGMA journal_mode = WAL").fetchone()[0])
        except sqlite3.OperationalError as error:
            if not is_busy(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def is_busy(error: sqlite3.Error) -> bool:
    """Whether SQLite says that another connection is in the way."""
    return _primary_code(error) == sqlite3.SQLITE_BUSY


def _primary_code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF


def translate(error: Exception, settings: Settings) -> Exception:
    """The error to give to the caller for whatever an operation raised."""
    if isinstance(error, LightningError):
        return error
    if isinstance(error, UnicodeEncodeError | OverflowError | sqlite3.InterfaceError | sqlite3.ProgrammingError):
        return DataError(f"store {settings.path} cannot hold this value: {error}")
    if not isinstance(error, sqlite3.Error):
        return error
    where = f"store {settings.path}"
    code = _primary_code(error)
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return SchemaError(
            f"{where} is corrupt or not an SQLite database ({error}): restore it from a backup, or rescue what can be read "
            f"with: sqlite3 {settings.path} .recover | sqlite3 rescued.db"
        )
    causes = {
        sqlite3.SQLITE_FULL: "the disk is full: free some space and try again; everything acknowledged is kept",
        sqlite3.SQLITE_IOERR: "the disk refused to read or write (full, over quota or failing): check it and try again; "
        "everything acknowledged is kept",
        sqlite3.SQLITE_BUSY: f"another process kept it locked for {settings.busy_timeout:g} s: "
        "end that process, or raise ?busy_timeout= in the store URL",
        sqlite3.SQLITE_READONLY: "the file or its folder is read-only: change its permissions or choose another path",
        sqlite3.SQLITE_CANTOPEN: "the file cannot be opened: check that the path is a file and its folder is writable",
        sqlite3.SQLITE_PERM: "permission denied: change the file's permissions or choose another path",
    }
    cause = causes.get(code, "SQLite refused the operation")
    passes = code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_BUSY)
    return (UnavailableError if passes else StoreError)(f"{where}: {cause} ({error})")


APPLICATION_ID: Final = 0x4C524C53
"""Lets `file` and this program tell a store from any other SQLite database ("LRLS")."""


def refuse_foreign(settings: Settings, *, make: bool) -> None:
    """Raise `SchemaError` for a foreign database, or one of another schema, and leave it as it is: `connect` would change its
    journal mode. Unless a store is to be made, raise `ConfigError` where there is no file, and `SchemaError` for an empty one.

    A file that cannot be opened is not refused: `connect` says why.
    """
    if settings.in_memory:
        return
    if not make and not Path(settings.path).is_file():
        raise ConfigError(
            f"there is no database at {settings.path!r}: give the folder of a run, a database file or a store's URL"
        )
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
        if not _is_made(connection, settings) and not make:
            raise SchemaError(f"store {settings.path} is empty: a store is made in it by whoever writes first")


def make_tables(connection: sqlite3.Connection, settings: Settings) -> None:
    """Make the tables where there are none. Raises `SchemaError` for a foreign database, or one of another schema."""
    if _is_made(connection, settings):
        return
    connection.execute("BEGIN IMMEDIATE")  # another process may make them at this moment: look again under the lock
    try:
        if not _is_made(connection, settings):
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            for statement in STATEMENTS:
                connection.execute(statement)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _is_made(connection: sqlite3.Connection, settings: Settings) -> bool:
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if "schema_version" not in tables:
        if tables:
            raise SchemaError(
                f"store {settings.path} is an SQLite database of another program (tables {', '.join(sorted(tables)[:5])}): "
                "choose another path"
            )
        return False
    check_version(f"store {settings.path}", connection.execute(VERSION).fetchall())
    return True


logger = logging.getLogger(__name__)
MOUNTS: Final = Path("/proc/self/mountinfo")
SHARED: Final = frozenset(
    {
        "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "fuse", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs",
        "virtiofs", "gfs2", "ocfs2", "vboxsf", "prl_fs", "wekafs", "panfs", "orangefs", "pvfs2",
    }
)  # fmt: skip
"""Types of file systems that several machines may have mounted, of `fuse.sshfs` and its like the first word."""
LOCAL: Final = frozenset({"fuse.fuse-overlayfs", "fuse.gocryptfs", "fuse.mergerfs"})


def shared_file_system(path: str) -> str:
    """The type of the file system that has this path, where other machines may have it too; empty otherwise."""
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        place = Path(path).resolve()
    except OSError:
        return ""
    found, depth = "", 0
    for line in lines:
        about, _, source = line.partition(" - ")
        fields = about.split(" ")
        if len(fields) < 5:  # it is not as the kernel's documentation has it
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[4]))
        if (
            place.is_relative_to(point) and len(point.parts) >= depth
        ):  # of two at one point the later one covers the other
            found, depth = source.split(" ")[0], len(point.parts)
    return found if found not in LOCAL and found.partition(".")[0] in SHARED else ""


def warn_of_shared(path: str) -> None:
    """Say what comes of a database on a file system that other machines may have."""
    if kind := shared_file_system(path):
        logger.warning(
            "store %s is on a file system of the type %s: if processes of two machines open it, SQLite destroys it without "
            "an error. Put it on a local disk, or use PostgreSQL (--store postgresql://...)",
            path,
            kind,
        )


MAX_GROUP: Final = 512
"""Operations in one transaction at most: bounds how long the first of them waits."""
GROUP_SECONDS: Final = 0.03
"""After so long a transaction takes in no more operations: other processes wait for its end."""
POLL: Final = 0.0005
"""Seconds between two tries to begin while another process writes. SQLite has no queue of those who wait: its own busy handler
sleeps for up to 0.1 s, and a process that writes all the time takes the lock again within a millisecond."""

NEVER_WAIT: Final = "PRAGMA busy_timeout = 0"
"""For the writing connection: the writer itself waits for other processes, and knows for how long."""


class _Job(WorkItem[T]):
    """An operation. It may run twice, but it is committed once.

    It does `first` before the transaction. One that could not begin before its `deadline`, by the monotonic clock, fails.
    """

    def __init__(self, operation: Operation[T], first: Callable[[], object] | None, deadline: float) -> None:
        super().__init__()
        self._operation = operation
        self.first = first
        self.deadline = deadline

    def run(self, transaction: SqliteTransaction) -> None:
        """Run the operation; raise what it raises."""
        self.error = None
        self.result = drive(self._operation(transaction))


class Writer:
    """Owns the writing connection. `ready` resolves when the file is open and has its tables, or fails with the reason."""

    def __init__(self, settings: Settings, bell: Bell, make: bool) -> None:
        self._settings = settings
        self._bell = bell
        self._make = make
        self._transaction: SqliteTransaction
        self._jobs: queue.SimpleQueue[_Job[object] | None] = queue.SimpleQueue()
        self._waiting: deque[_Job[object]] = deque()
        self._lock = threading.Lock()
        self._closed = False
        self._stop = False
        self._broken = False
        self.identity: Identity = None
        self._parents = ParentCache[int]()
        self._connection: sqlite3.Connection
        self.ready: Future[None] = Future()
        self.ready.set_running_or_notify_cancel()  # one caller that gives up must not cancel the others' wait
        self._thread = threading.Thread(target=self._main, name="lightning-store-writer", daemon=True)
        self._thread.start()

    def submit(self, operation: Operation[T], first: Callable[[], object] | None = None) -> asyncio.Future[T]:
        """Queue an operation for the running loop to wait for, and what it does `first`. Raises `StoreError` after `close`."""
        job = _Job(operation, first, time.monotonic() + self._settings.busy_timeout)
        with self._lock:
            if self._closed:
                raise closed_error(self._settings.path)
            self._jobs.put(job)  # type: ignore[arg-type]  # the queue does not look at results
        return job.waiter

    def close(self) -> None:
        """Commit what is queued, then close the file. Blocks; idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        self._thread.join()

    def _main(self) -> None:
        try:
            refuse_foreign(self._settings, make=self._make)
            self._connection = connect(self._settings)
        except Exception as error:  # noqa: BLE001 — whatever it is, it belongs to whoever opens the store
            self._refuse(translate(error, self._settings))
            return
        try:
            make_tables(self._connection, self._settings)
            self._connection.execute(NEVER_WAIT)
            self.identity = identity(self._settings)
        except Exception as error:  # noqa: BLE001 — likewise
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
        """Move what was queued to those that wait for a transaction, without those whose caller has gone away, and do what they
        do before it. `wait` for one if there is none. False when there is none, as when the writer stops."""
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
        except Exception as error:  # noqa: BLE001 — an operation's error belongs to its caller
            job.error = error
            deliver([job])
            return False
        return True

    def _commit_group(self) -> None:
        """Run what waits in one transaction; if that transaction is lost, each in its own."""
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
        except Exception as error:  # noqa: BLE001 — the thread must outlive it: every caller waits on this thread
            self._roll_back()
            if not group and self._waiting:  # it could not even begin
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
            self._transaction.forget_changes()
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
        """Begin a transaction for those that wait. Each fails at its own deadline; False when none is left."""
        while self._waiting:
            try:
                self._begin(self._waiting[0].deadline)
            except sqlite3.OperationalError as error:
                if not is_busy(error):
                    raise
                self._receive(wait=False)
                now = time.monotonic()
                late = []
                while self._waiting and self._waiting[0].deadline <= now:
                    late.append(self._waiting.popleft())
                    late[-1].error = translate(error, self._settings)
                deliver(late)
            else:
                return True
        return False

    def _begin(self, deadline: float) -> None:
        """Begin a transaction. Raises SQLite's `busy` when others write until the deadline."""
        if self._broken:
            self._connection.close()
            self._connection = connect(self._settings, opened=self.identity)
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
        self._connection.execute("COMMIT")
        self._parents.keep()
        if self._transaction.changed_runs:
            self._bell.ring(self._transaction.changed_runs)

    def _roll_back(self) -> None:
        self._parents.forget()
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error:
            self._broken = True  # the connection is of no more use: the next transaction gets a new one
