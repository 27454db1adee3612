"""The one thread that writes: operations that wait together are committed together.

The invariant: a future is resolved only after the transaction that holds its operation is committed, and an operation that
fails takes none of its neighbours with it.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

from lightning.store.relational.notify import Bell
from lightning.store.relational.prefix_parents import ParentCache
from lightning.store.relational.transaction import Operation
from lightning.store.sqlite.connection import (
    Identity,
    Settings,
    SqliteTransaction,
    check_identity,
    connect,
    drive,
    identity,
    is_busy,
    make_tables,
    refuse_foreign,
    translate,
)
from lightning.store.sqlite.place import warn_of_shared
from lightning.store.threads import WorkItem, closed_error, deliver

T = TypeVar("T")
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
        self._parents = ParentCache()
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
