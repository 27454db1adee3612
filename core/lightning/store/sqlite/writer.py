"""The one thread that writes: operations that wait together are committed together.

The invariant: a future is resolved only after the transaction that holds its operation is committed, and an operation that
fails takes none of its neighbours with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Final, Generic, TypeVar

from lightning.errors import StoreError
from lightning.store.relational.bell import Bell
from lightning.store.relational.parents import ParentCache
from lightning.store.relational.transaction import Operation
from lightning.store.sqlite.connection import Settings, SqliteTransaction, connect, drive, translate
from lightning.store.sqlite.migrations import migrate, refuse_foreign

T = TypeVar("T")
MAX_GROUP: Final = 512
"""Operations in one transaction at most: bounds how long the first of them waits."""


class _Job(Generic[T]):
    """An operation and the task on `loop` that waits for it. It may run twice, but it is committed once."""

    def __init__(self, operation: Operation[T], loop: asyncio.AbstractEventLoop) -> None:
        self._operation = operation
        self._result: T | None = None
        self._error: Exception | None = None
        self.loop = loop
        self.waiter: asyncio.Future[T] = loop.create_future()

    def run(self, transaction: SqliteTransaction) -> None:
        """Run the operation; raise what it raises."""
        self._error = None
        self._result = drive(self._operation(transaction))

    def failed(self, error: Exception) -> None:
        self._error = error

    def deliver(self) -> None:
        """Tell the caller, on the caller's loop. Only after COMMIT or ROLLBACK."""
        if self.waiter.done():
            return
        if self._error is not None:
            self.waiter.set_exception(self._error)
        else:
            self.waiter.set_result(self._result)  # type: ignore[arg-type]  # T may be Optional itself


def _deliver(group: Sequence[_Job[object]]) -> None:
    """Wake each loop once for all its callers: a wake-up for each would hand the interpreter lock to and fro."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Job[object]]] = {}
    for job in group:
        by_loop.setdefault(job.loop, []).append(job)
    for loop, jobs in by_loop.items():
        # A closed loop has nobody left who waits.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_deliver_here, jobs)


def _deliver_here(jobs: Sequence[_Job[object]]) -> None:
    for job in jobs:
        job.deliver()


class Writer:
    """Owns the writing connection. `ready` resolves when the file is open and migrated, or fails with the reason."""

    def __init__(self, settings: Settings, bell: Bell) -> None:
        self._settings = settings
        self._bell = bell
        self._transaction: SqliteTransaction
        self._jobs: queue.SimpleQueue[_Job[object] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._stop = False
        self._broken = False
        self._parents = ParentCache()
        self._connection: sqlite3.Connection
        self.ready: Future[None] = Future()
        self.ready.set_running_or_notify_cancel()  # one caller that gives up must not cancel the others' wait
        self._thread = threading.Thread(target=self._main, name="lightning-store-writer", daemon=True)
        self._thread.start()

    def submit(self, operation: Operation[T]) -> asyncio.Future[T]:
        """Queue an operation for the running loop to wait for. Raises `StoreError` after `close`."""
        job = _Job(operation, asyncio.get_running_loop())
        with self._lock:
            if self._closed:
                raise closed_error(self._settings)
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
            refuse_foreign(self._settings)
            self._connection = connect(self._settings)
        except Exception as error:  # noqa: BLE001 — whatever it is, it belongs to whoever opens the store
            self._refuse(translate(error, self._settings))
            return
        try:
            migrate(self._connection, self._settings)
        except Exception as error:  # noqa: BLE001 — likewise
            self._connection.close()
            self._refuse(translate(error, self._settings))
            return
        self.ready.set_result(None)
        while (job := self._next(wait=True)) is not None:
            self._commit_group(job)
        self._connection.close()

    def _refuse(self, error: Exception) -> None:
        with self._lock:
            self._closed = True
        self.ready.set_exception(error)

    def _next(self, *, wait: bool) -> _Job[object] | None:
        """The next job whose caller has not gone away; None when the writer stops, or when there is nothing to wait for."""
        while not self._stop:
            try:
                job = self._jobs.get(block=wait)
            except queue.Empty:
                return None
            if job is None:
                self._stop = True
            elif not job.waiter.cancelled():
                return job
        return None

    def _commit_group(self, first: _Job[object]) -> None:
        """Run `first` and everything queued behind it in one transaction; if that transaction is lost, each in its own."""
        group = [first]
        try:
            transaction = self._begin()
            self._run_in_savepoint(first, transaction)
            while len(group) < MAX_GROUP and (job := self._next(wait=False)) is not None:
                group.append(job)
                self._run_in_savepoint(job, transaction)
            self._commit()
        except Exception as error:  # noqa: BLE001 — the thread must outlive it: every caller waits on this thread
            self._roll_back()
            if len(group) == 1:
                first.failed(translate(error, self._settings))
            else:
                for job in group:
                    self._commit_alone(job)
        _deliver(group)

    def _run_in_savepoint(self, job: _Job[object], transaction: SqliteTransaction) -> None:
        self._connection.execute("SAVEPOINT job")
        try:
            job.run(transaction)
        except Exception as error:
            if not self._connection.in_transaction:
                raise  # SQLite rolled back everything by itself, as it may when the disk is full
            self._connection.execute("ROLLBACK TO job")
            self._transaction.forget_changes()
            self._parents.forget()
            job.failed(translate(error, self._settings))
        self._connection.execute("RELEASE job")

    def _commit_alone(self, job: _Job[object]) -> None:
        try:
            job.run(self._begin())
            self._commit()
        except Exception as error:  # noqa: BLE001 — an operation's error belongs to its caller
            self._roll_back()
            job.failed(translate(error, self._settings))

    def _begin(self) -> SqliteTransaction:
        if self._broken:
            self._connection.close()
            self._connection = connect(self._settings)
            self._broken = False
        self._connection.execute("BEGIN IMMEDIATE")
        self._transaction = SqliteTransaction(self._connection, self._parents)
        return self._transaction

    def _commit(self) -> None:
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


def closed_error(settings: Settings) -> StoreError:
    """The error for using a store that is not open."""
    return StoreError(f"store {settings.path} is not open: await store.open() first, and use it before close()")
