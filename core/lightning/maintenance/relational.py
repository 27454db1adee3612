"""`RelationalKeeper`: what looking after a database is, whichever SQL database it is.

The invariant: nothing is written to a database whose schema is not this release's, and what is removed is removed in one
transaction with all that refers to it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, TypeVar

from lightning.errors import SchemaError, StoreError
from lightning.maintenance import queries
from lightning.maintenance.keeper import DatabaseStatus, Weight, count_tokens
from lightning.store.relational.transaction import Operation, Transaction
from lightning.store.url import redacted

T = TypeVar("T")
_VERSION = "SELECT version FROM schema_version"


class RelationalKeeper(ABC):
    """A `Keeper` but for copies. `newest` is the version of this release's schema."""

    no_schema: ClassVar[int | None] = None
    """The version of a database without tables."""
    upgrade: str = "--no-backup"
    """What `lightning db upgrade` is to be given."""

    def __init__(self, url: str, newest: int) -> None:
        self._url = url
        self._newest = newest

    @abstractmethod
    async def _read(self, operation: Operation[T]) -> T:
        """Run an operation that sees one moment, on a schema of any version."""

    @abstractmethod
    async def _write(self, operation: Operation[T], *, alone: bool = False) -> T:
        """Run an operation in one transaction. Raises `SchemaError` for another release's schema.

        `alone`: nobody else may use the database, where it would not know what was removed.
        """

    @abstractmethod
    async def _give_back(self) -> str:
        """Give space back to the file system; see `Keeper.vacuum`."""

    @abstractmethod
    async def _tables(self, transaction: Transaction) -> set[str]:
        """The tables there are."""

    @abstractmethod
    async def _bytes(self, transaction: Transaction) -> int:
        """How much space the store takes."""

    async def _version(self, transaction: Transaction) -> int | None:
        if "schema_version" not in await self._tables(transaction):
            return self.no_schema
        row = await transaction.one(_VERSION)
        if row is None or not isinstance(row[0], int) or row[0] < 1:  # a schema and its version are made at once
            found = "no row" if row is None else repr(row[0])
            raise SchemaError(f"{redacted(self._url)} has a damaged schema_version ({found}): restore it from a backup")
        return row[0]

    async def _check_newest(self, transaction: Transaction) -> None:
        """Raise `SchemaError` for a schema that is missing or not this release's."""
        version = await self._version(transaction)
        if version is None:
            raise self._nothing()
        if version != self._newest:
            raise SchemaError(
                f"{redacted(self._url)} has schema version {version}, this release works on {self._newest}: "
                f"run `lightning db upgrade {self.upgrade}` with this release or a newer one first"
            )

    def _nothing(self) -> SchemaError:
        return SchemaError(f"{redacted(self._url)} holds no store: check ?schema= in the URL")

    async def schema(self) -> tuple[int, int]:
        """See `Keeper.schema`."""
        version = await self._read(self._version)
        if version is None:
            raise self._nothing()
        return version, self._newest

    async def status(self) -> DatabaseStatus:
        """See `Keeper.status`."""
        return await self._read(self._status)

    async def _status(self, transaction: Transaction) -> DatabaseStatus:
        tables = await self._tables(transaction)
        counts = dict.fromkeys(queries.COUNTED, 0)
        for table in tables & counts.keys():
            (counts[table],) = await transaction.one(queries.count(table)) or (0,)
        empty = "runs" not in tables
        activity = [] if empty else await transaction.all(queries.ACTIVITY)
        first = None if empty else await transaction.one(queries.FIRST_RUN)
        tokens = await transaction.all(queries.TOKENS) if "tokens" in tables else []
        return DatabaseStatus(
            store=redacted(self._url),
            schema=await self._version(transaction),
            newest_schema=self._newest,
            bytes=await self._bytes(transaction),
            runs=counts["runs"],
            rollouts={} if empty else {row[0]: row[1] for row in await transaction.all(queries.BY_STATUS)},
            calls=counts["transitions"],
            spans=counts["spans"],
            steps=counts["steps"],
            resources=counts["resources"],
            tokens=count_tokens([(row[0], row[1]) for row in tokens], await transaction.now()),
            oldest=None if first is None else first[0],
            newest=max((row[1] for row in activity), default=None),
        )

    async def activity(self) -> dict[str, float]:
        """See `Keeper.activity`."""
        return {row[0]: row[1] for row in await self._read(lambda tx: tx.all(queries.ACTIVITY))}

    async def busy_runs(self) -> frozenset[str]:
        """See `Keeper.busy_runs`."""
        return await self._read(_busy)

    async def weigh(self, run: str, groups: Sequence[str]) -> list[Weight]:
        """See `Keeper.weigh`."""

        async def weigh(transaction: Transaction) -> list[Weight]:
            found = []
            for group in groups:
                calls, size = await transaction.one(queries.WEIGH_CALLS, (run, group)) or (0, 0)
                (spans,) = await transaction.one(queries.WEIGH_SPANS, (run, group)) or (0,)
                found.append(Weight(calls, spans, int(size)))
            return found

        return await self._read(weigh)

    async def forget_calls(self, run: str, groups: Sequence[str]) -> None:
        """See `Keeper.forget_calls`. A transaction for each group: whoever writes meanwhile waits for one of them at most."""
        for group in groups:
            await self._write(lambda tx, group=group: _forget_calls(tx, run, group))  # type: ignore[misc]

    async def forget_run(self, run: str) -> None:
        """See `Keeper.forget_run`."""
        await self._write(lambda tx: self._forget_run(tx, run), alone=True)

    async def _forget_run(self, transaction: Transaction, run: str) -> None:
        await transaction.alone(f"rollouts {run}")
        # In the order of those who append: nobody does from here on.
        rollouts = {row[0] for row in await transaction.locked(queries.ROLLOUTS, (run,))}
        if run in await _busy(transaction):
            raise StoreError(f"somebody works on run {run!r}: end its trainer and its runners first")
        tables = await self._tables(transaction)
        for statement in queries.FORGET_RUN:
            if statement.split()[2] in tables:
                await transaction.run(statement, (run,))
        state = {row[0]: row[1] for row in await transaction.all(queries.UNNAMED_STATE)}
        left = [("", name) for name in queries.fleet_state(run, state)]
        traces = [(row[0], row[1]) for row in await transaction.all(queries.TRACES)]
        left += [(queries.TRACES_RUN, name) for name in queries.traces_of(rollouts, traces)]
        await transaction.many(queries.FORGET_STATE, left)

    async def vacuum(self) -> str:
        """See `Keeper.vacuum`."""
        await self._forget_old_traces()
        await self._write(_clear)
        return await self._give_back()

    async def _forget_old_traces(self) -> None:
        """Looks for them outside of the transactions that remove them, which are short: others write meanwhile."""
        after = ""

        async def look(transaction: Transaction) -> tuple[str, list[tuple[str, str]]]:
            traces = [(row[0], row[1]) for row in await transaction.all(queries.TRACES_AFTER, page)]
            rollouts = sorted({queries.trace_of(value)[0] for _, value in traces})
            there = await transaction.all(queries.which_are_there(rollouts), rollouts) if rollouts else []
            old = queries.old_traces(traces, {row[0] for row in there}, await transaction.now())
            return traces[-1][0] if traces else "", old

        while True:
            page = (after, queries.TRACES_AT_ONCE)
            after, old = await self._read(look)
            if not after:
                return
            if old:
                await self._write(lambda tx, old=old: tx.many(queries.FORGET_STATE, old))  # type: ignore[misc]


async def _busy(transaction: Transaction) -> frozenset[str]:
    return frozenset(row[0] for row in await transaction.all(queries.BUSY, (await transaction.now(),)))


async def _forget_calls(transaction: Transaction, run: str, group: str) -> None:
    await transaction.alone(f"rollouts {run}")  # a rollout that is created now comes after this, with its calls
    (unended,) = await transaction.one(queries.UNENDED, (run, group)) or (0,)
    if not unended:
        for statement in queries.FORGET_CALLS:
            await transaction.run(statement, (run, group))


async def _clear(transaction: Transaction) -> None:
    # Notices before runs: whoever announces one has put the run before.
    state = {row[0]: row[1] for row in await transaction.all(queries.UNNAMED_STATE)}
    runs = {row[0] for row in await transaction.all(queries.RUNS)}
    await transaction.many(queries.FORGET_STATE, [("", name) for name in queries.empty_seats(state, runs)])
    await transaction.run(queries.FORGET_OLD_ANSWERS, (await transaction.now(),))
