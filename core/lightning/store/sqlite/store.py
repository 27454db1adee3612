"""`SqliteStore`: the `Store` protocol over one writer thread and a few readers beside it.

The invariant: methods may be awaited from any event loop and any thread of the process that opened the store; a write that was
awaited is committed, and every later read sees it.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Final, TypeVar

from lightning.errors import ConfigError, StoreError
from lightning.store import rows, rules
from lightning.store.protocol import LATEST, Alias, MetricPoint, Page, ResourceUse, Watch
from lightning.store.sqlite import records
from lightning.store.sqlite import resources as resource_ops
from lightning.store.sqlite import rollouts as rollout_ops
from lightning.store.sqlite import spans as span_ops
from lightning.store.sqlite import tokens as token_ops
from lightning.store.sqlite import transitions as transition_ops
from lightning.store.sqlite.connection import Settings, Transaction, connect, translate
from lightning.store.sqlite.watching import Bell, watching
from lightning.store.sqlite.writer import Writer, closed_error
from lightning.store.url import StoreURL, parse
from lightning.types import (
    Json,
    Lease,
    Outcome,
    Resource,
    Rollout,
    Run,
    Span,
    Status,
    StepRecord,
    StepReward,
    Token,
    ToolEvent,
    Transition,
)

T = TypeVar("T")
READERS: Final = 2


class _Readers:
    """A few threads, each with its own connection, that read committed snapshots while the writer writes."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._local = threading.local()
        self._lock = threading.Lock()
        self._connections: list[sqlite3.Connection] = []
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="lightning-store-reader")

    def submit(self, operation: Callable[[Transaction], T]) -> Future[T]:
        return self._pool.submit(self._read, operation)

    def _read(self, operation: Callable[[Transaction], T]) -> T:
        connection = self._connection()
        try:
            connection.execute("BEGIN")
            try:
                return operation(Transaction(connection))
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
            connection = self._local.connection = connect(self._settings, read_only=True)
            with self._lock:
                self._connections.append(connection)
        return connection

    def close(self) -> None:
        self._pool.shutdown(wait=True)
        for connection in self._connections:
            connection.close()


class SqliteStore:
    """A store in the SQLite file `path`, which is created with its folder if it is missing.

    `sync="full"` makes acknowledged writes survive a power cut as well as the death of every process; `busy_timeout` is how
    many seconds to wait for another process that writes. Raises `ConfigError` for settings that cannot be meant.
    """

    def __init__(self, path: str | Path, *, sync: str = "normal", busy_timeout: float = 30.0) -> None:
        self._settings = Settings(str(path), sync, busy_timeout)
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
        if where.host or where.path in ("", ":memory:"):
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

    async def open(self) -> None:
        """See `Store.open`."""
        with self._lock:
            if self._writer is None:
                self._writer = Writer(self._settings, self._bell)
                self._readers = None if self._settings.in_memory else _Readers(self._settings)
                self._process = os.getpid()
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

    async def _write(self, operation: Callable[[Transaction], T]) -> T:
        return await self._open_writer().submit(operation)

    async def _read(self, operation: Callable[[Transaction], T]) -> T:
        writer, readers = self._open_writer(), self._readers
        # A private in-memory database has one connection: there, reads queue with the writes.
        if readers is None:
            return await writer.submit(operation)
        return await asyncio.wrap_future(readers.submit(operation))

    def _open_writer(self) -> Writer:
        writer = self._writer
        if writer is None:
            raise closed_error(self._settings)
        if self._process != os.getpid():
            raise StoreError(
                f"store {self._settings.path} was opened in process {self._process} and is used in its fork {os.getpid()}: "
                "open a store of its own in each process"
            )
        return writer

    # runs -------------------------------------------------------------------------------------------------------
    async def put_run(self, run: Run) -> Run:
        """See `Store.put_run`."""
        return await self._write(lambda tx: records.put_run(tx, run))

    async def get_run(self, run: str) -> Run | None:
        """See `Store.get_run`."""
        return await self._read(lambda tx: records.get_run(tx, run))

    async def list_runs(self, project: str | None = None) -> list[Run]:
        """See `Store.list_runs`."""
        return await self._read(lambda tx: records.list_runs(tx, project))

    def watch(self, run: str) -> AbstractAsyncContextManager[Watch]:
        """See `Store.watch`."""
        return watching(self._bell, run, lambda: self._read(lambda tx: records.revision(tx, run)))

    # rollouts ---------------------------------------------------------------------------------------------------
    async def create_rollouts(self, rollouts: Sequence[Rollout]) -> int:
        """See `Store.create_rollouts`."""
        return await self._write(lambda tx: rollout_ops.create(tx, rollouts))

    async def get_rollout(self, rollout: str) -> Rollout | None:
        """See `Store.get_rollout`."""
        return await self._read(lambda tx: rollout_ops.get(tx, rollout))

    async def list_rollouts(
        self,
        run: str,
        *,
        split: str | None = None,
        step: int | None = None,
        status: Status | None = None,
        cursor: str = "",
        limit: int = 1000,
    ) -> Page:
        """See `Store.list_rollouts`."""
        return await self._read(lambda tx: rollout_ops.page(tx, run, split, step, status, cursor, limit))

    async def lease(self, run: str, worker: str, *, limit: int = 1, ttl: float = 60.0) -> list[Lease]:
        """See `Store.lease`."""
        return await self._write(lambda tx: rollout_ops.lease(tx, run, worker, limit, ttl))

    async def renew(self, lease: Lease, *, ttl: float = 60.0) -> Lease:
        """See `Store.renew`."""
        return await self._write(lambda tx: rollout_ops.renew(tx, lease, ttl))

    async def complete(self, rollout: str, attempt: int, outcome: Outcome) -> Rollout:
        """See `Store.complete`."""
        end = rules.ending(rollout, outcome)
        return await self._write(lambda tx: rollout_ops.complete(tx, rollout, attempt, end))

    async def release(self, worker: str) -> int:
        """See `Store.release`."""
        return await self._write(lambda tx: rollout_ops.release(tx, worker))

    # transitions ------------------------------------------------------------------------------------------------
    async def append(self, transitions: Sequence[Transition]) -> int:
        """See `Store.append`."""
        return await self._write(lambda tx: transition_ops.append(tx, transitions))

    async def next_seq(self, rollout: str, attempt: int) -> int:
        """See `Store.next_seq`."""
        return await self._read(lambda tx: transition_ops.next_seq(tx, rollout, attempt))

    async def transitions(self, rollout: str, attempt: int | None = None) -> list[Transition]:
        """See `Store.transitions`."""
        return await self._read(lambda tx: transition_ops.read(tx, rollout, attempt))

    async def transitions_of(self, attempts: Sequence[tuple[str, int]]) -> list[list[Transition]]:
        """See `Store.transitions_of`."""
        return await self._read(lambda tx: transition_ops.read_many(tx, attempts))

    async def tool_events(self, rollout: str, attempt: int | None = None) -> list[ToolEvent]:
        """See `Store.tool_events`."""
        return await self._read(lambda tx: records.tool_events(tx, rollout, attempt))

    async def step_rewards(self, rollout: str, attempt: int | None = None) -> list[StepReward]:
        """See `Store.step_rewards`."""
        return await self._read(lambda tx: records.step_rewards(tx, rollout, attempt))

    # spans ------------------------------------------------------------------------------------------------------
    async def append_spans(self, spans: Sequence[Span]) -> int:
        """See `Store.append_spans`."""
        return await self._write(lambda tx: span_ops.append(tx, spans))

    async def spans(self, rollout: str, attempt: int | None = None) -> list[Span]:
        """See `Store.spans`."""
        return await self._read(lambda tx: span_ops.read(tx, rollout, attempt))

    # steps, metrics, small state --------------------------------------------------------------------------------
    async def commit_step(self, record: StepRecord) -> None:
        """See `Store.commit_step`."""
        await self._write(lambda tx: records.commit_step(tx, record))

    async def list_steps(self, run: str) -> list[StepRecord]:
        """See `Store.list_steps`."""
        return await self._read(lambda tx: records.list_steps(tx, run))

    async def log_metrics(self, run: str, step: int, values: Mapping[str, float]) -> None:
        """See `Store.log_metrics`."""
        await self._write(lambda tx: records.log_metrics(tx, run, step, values))

    async def metrics(self, run: str) -> list[MetricPoint]:
        """See `Store.metrics`."""
        return await self._read(lambda tx: records.metrics(tx, run))

    async def put_state(self, run: str, key: str, value: Json) -> None:
        """See `Store.put_state`."""
        text = rows.dump(value, f"the state {key!r}")
        await self._write(lambda tx: records.put_state(tx, run, key, text))

    async def keep_state(self, run: str, key: str, value: Json) -> Json:
        """See `Store.keep_state`."""
        text = rows.dump(value, f"the state {key!r}")
        return await self._write(lambda tx: records.keep_state(tx, run, key, text))

    async def get_state(self, run: str, key: str) -> Json:
        """See `Store.get_state`."""
        return await self._read(lambda tx: records.get_state(tx, run, key))

    # tokens -----------------------------------------------------------------------------------------------------
    async def put_token(self, token: Token) -> Token:
        """See `Store.put_token`."""
        return await self._write(lambda tx: token_ops.put(tx, token))

    async def get_token(self, token: str) -> Token | None:
        """See `Store.get_token`."""
        return await self._read(lambda tx: token_ops.get(tx, token))

    async def list_tokens(self) -> list[Token]:
        """See `Store.list_tokens`."""
        return await self._read(token_ops.all_tokens)

    async def revoke_token(self, token: str) -> Token:
        """See `Store.revoke_token`."""
        return await self._write(lambda tx: token_ops.revoke(tx, token))

    # resources --------------------------------------------------------------------------------------------------
    async def put_resource(self, resource: Resource) -> Resource:
        """See `Store.put_resource`."""
        return await self._write(lambda tx: resource_ops.put(tx, resource))

    async def get_resource(self, name: str, which: int | str = LATEST) -> Resource | None:
        """See `Store.get_resource`."""
        return await self._read(lambda tx: resource_ops.get(tx, name, which))

    async def list_resources(self, name: str | None = None) -> list[Resource]:
        """See `Store.list_resources`."""
        return await self._read(lambda tx: resource_ops.versions(tx, name))

    async def set_alias(self, name: str, alias: str, version: int) -> Alias:
        """See `Store.set_alias`."""
        return await self._write(lambda tx: resource_ops.set_alias(tx, name, alias, version))

    async def roll_back_alias(self, name: str, alias: str) -> Alias:
        """See `Store.roll_back_alias`."""
        return await self._write(lambda tx: resource_ops.roll_back(tx, name, alias))

    async def list_aliases(self, name: str | None = None) -> list[Alias]:
        """See `Store.list_aliases`."""
        return await self._read(lambda tx: resource_ops.aliases(tx, name))

    async def alias_history(self, name: str, alias: str) -> list[Alias]:
        """See `Store.alias_history`."""
        return await self._read(lambda tx: resource_ops.history(tx, name, alias))

    async def resource_uses(self, name: str) -> list[ResourceUse]:
        """See `Store.resource_uses`."""
        return await self._read(lambda tx: resource_ops.uses(tx, name))


def _close(writer: Writer, readers: _Readers | None) -> None:
    if readers is not None:
        readers.close()  # first: SQLite folds the log into the file when the last connection goes
    writer.close()
