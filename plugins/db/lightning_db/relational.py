"""`RelationalKeeper`: the keeper of any SQL database.

The invariant: a database of another schema is neither read nor written. A row is removed in one transaction with all rows that
refer to it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Final, TypeVar, cast

from lightning.errors import SchemaError, StoreError
from lightning.plugins import plugins
from lightning.store import schema
from lightning.store.protocol import TRACES_RUN
from lightning.store.relational.transaction import Operation, SqlPart, Transaction
from lightning.store.schema import SCHEMA
from lightning.store.url import redacted

from lightning_db import queries
from lightning_db.keeper import DatabaseStatus, Weight, count_tokens

T = TypeVar("T")
SELECT_VERSIONS: Final = "SELECT name, version FROM operation_groups ORDER BY name"
TRACES_AT_ONCE: Final = 500
"""The most traces that are removed in one transaction, for which other writers wait. There is one for each attempt that ever
was."""


class RelationalKeeper(ABC):
    """A `Keeper` without `backup` and `restore`. A subclass runs operations with `_read` and `_write`."""

    def __init__(self, url: str) -> None:
        self._url = url

    @abstractmethod
    async def _read(self, operation: Operation[T]) -> T:
        """Run an operation that changes nothing, on one snapshot, and return its result."""

    @abstractmethod
    async def _write(self, operation: Operation[T], *, alone: bool = False) -> T:
        """Run an operation in one transaction and return its result. Raises `SchemaError` for a database of another schema.

        With `alone` no other process may use a database whose processes would not notice the removal.
        """

    @abstractmethod
    async def _give_back(self) -> str:
        """Give free space back to the file system. Return why that was not possible; empty if it was (`Keeper.vacuum`)."""

    @abstractmethod
    async def _tables(self, transaction: Transaction) -> set[str]:
        """Return the names of the existing tables."""

    @abstractmethod
    async def _bytes(self, transaction: Transaction) -> int:
        """Return how many bytes the store takes."""

    async def _check(self, transaction: Transaction) -> None:
        """Raise `SchemaError` for a database without tables or with another schema."""
        if "schema_version" not in await self._tables(transaction):
            raise SchemaError(f"{redacted(self._url)} holds no store: check ?schema= in the URL")
        schema.check_version(redacted(self._url), await transaction.all(schema.VERSION))

    async def _groups(self, transaction: Transaction) -> dict[str, SqlPart]:
        """Return the groups of plugins whose tables the database has. Raises `StoreError` for tables of a plugin that is not
        installed."""
        return await groups_in(transaction, parts(), redacted(self._url))

    async def status(self) -> DatabaseStatus:
        """Return the database's content in numbers (`Keeper.status`)."""
        return await self._read(self._status)

    async def _status(self, transaction: Transaction) -> DatabaseStatus:
        await self._check(transaction)
        counts = {}
        there = await self._tables(transaction)
        for table in queries.COUNTED:
            (counts[table],) = (await transaction.one(queries.count(table)) if table in there else None) or (0,)
        activity = await transaction.all(queries.ACTIVITY)
        first = await transaction.one(queries.FIRST_RUN)
        tokens = await transaction.all(queries.TOKENS) if "tokens" in there else []
        return DatabaseStatus(
            store=redacted(self._url),
            schema=SCHEMA,
            bytes=await self._bytes(transaction),
            runs=counts["runs"],
            rollouts={row[0]: row[1] for row in await transaction.all(queries.BY_STATUS)},
            calls=counts["transitions"],
            spans=counts["spans"],
            steps=counts["steps"],
            resources=counts["resources"],
            tokens=count_tokens([(row[0], row[1]) for row in tokens], await transaction.now()),
            oldest=None if first is None else first[0],
            newest=max((row[1] for row in activity), default=None),
        )

    async def activity(self) -> dict[str, float]:
        """Return when an attempt of each run last began or ended (`Keeper.activity`)."""
        return {row[0]: row[1] for row in await self._read(lambda tx: tx.all(queries.ACTIVITY))}

    async def busy_runs(self) -> frozenset[str]:
        """Return the runs in which a worker holds a valid lease (`Keeper.busy_runs`)."""
        return await self._read(_busy)

    async def branched_runs(self) -> frozenset[str]:
        """Return the runs with rollouts that are branches (`Keeper.branched_runs`)."""
        return frozenset(row[0] for row in await self._read(lambda tx: tx.all(queries.BRANCHED)))

    async def weigh(self, run: str, groups: Sequence[str]) -> list[Weight]:
        """Return how much data of each of these groups is stored (`Keeper.weigh`)."""

        async def weigh(transaction: Transaction) -> list[Weight]:
            found, has_spans = [], "spans" in await self._tables(transaction)
            for group in groups:
                calls, size = await transaction.one(queries.WEIGH_CALLS, (run, group)) or (0, 0)
                (spans,) = await transaction.one(queries.WEIGH_SPANS, (run, group)) or (0,) if has_spans else (0,)
                found.append(Weight(calls, spans, int(size)))
            return found

        return await self._read(weigh)

    async def forget_calls(self, run: str, groups: Sequence[str]) -> None:
        """Remove the calls of groups (`Keeper.forget_calls`), each group in its own transaction, so that other writers wait
        only for one."""
        for group in groups:
            await self._write(lambda tx, group=group: self._forget_calls(tx, run, group))  # type: ignore[misc]

    async def _forget_calls(self, transaction: Transaction, run: str, group: str) -> None:
        await transaction.alone(f"rollouts {run}")  # no rollout is created before this transaction ends
        (unended,) = await transaction.one(queries.UNENDED, (run, group)) or (0,)
        if not unended:
            if "spans" in await self._tables(transaction):
                await transaction.run(queries.FORGET_SPANS, (run, group))
            for statement in queries.FORGET_CALLS:
                await transaction.run(statement, (run, group))

    async def forget_run(self, run: str) -> None:
        """Remove a run with all of its data (`Keeper.forget_run`)."""
        await self._write(lambda tx: self._forget_run(tx, run), alone=True)

    async def _forget_run(self, transaction: Transaction, run: str) -> None:
        await transaction.alone(f"rollouts {run}")
        # Locked in the order in which `append` locks them; from here on nobody appends.
        rollouts = {row[0] for row in await transaction.locked(queries.ROLLOUTS, (run,))}
        if run in await _busy(transaction):
            raise StoreError(f"somebody works on run {run!r}: end its trainer and its runners first")
        tables = await self._tables(transaction)
        for statement in queries.FORGET_RUN:
            if statement.split()[2] in tables:
                await transaction.run(statement, (run,))
        names = [row[0] for row in await transaction.all(queries.UNNAMED_STATE)]
        left = [("", name) for name in queries.fleet_state(run, names)]
        traces = [(row[0], row[1]) for row in await transaction.all(queries.TRACES)]
        left += [(TRACES_RUN, name) for name in queries.traces_of(rollouts, traces)]
        await transaction.many(queries.FORGET_STATE, left)

    async def vacuum(self) -> str:
        """Remove expired data, and give free space back to the file system (`Keeper.vacuum`)."""
        await self._forget_old_traces()
        await self._write(_clear)
        return await self._give_back()

    async def _forget_old_traces(self) -> None:
        """Remove old traces. They are looked for outside the transactions that remove them, which are short for other
        writers."""
        after = ""

        async def look(transaction: Transaction) -> tuple[str, list[tuple[str, str]]]:
            traces = [(row[0], row[1]) for row in await transaction.all(queries.TRACES_AFTER, page)]
            rollouts = sorted({queries.trace_of(value)[0] for _, value in traces})
            there = await transaction.all(queries.which_are_there(rollouts), rollouts) if rollouts else []
            old = queries.old_traces(traces, {row[0] for row in there}, await transaction.now())
            return traces[-1][0] if traces else "", old

        while True:
            page = (after, TRACES_AT_ONCE)
            after, old = await self._read(look)
            if not after:
                return
            if old:
                await self._write(lambda tx, old=old: tx.many(queries.FORGET_STATE, old))  # type: ignore[misc]


def parts() -> dict[str, SqlPart]:
    """Return the parts for SQL databases of all installed plugins' operations, by the groups' names."""
    found = {}
    for operation in plugins().operations():
        group = operation.group
        if group is not None and group.name not in found and "sql" in group.parts:
            found[group.name] = cast("SqlPart", group.part(operation, "sql", "a database"))
    return found


async def _busy(transaction: Transaction) -> frozenset[str]:
    return frozenset(row[0] for row in await transaction.all(queries.BUSY, (await transaction.now(),)))


async def _clear(transaction: Transaction) -> None:
    # The notices are read before the runs, because a trainer stores its run before its notice.
    state = {row[0]: row[1] for row in await transaction.all(queries.UNNAMED_STATE)}
    runs = {row[0] for row in await transaction.all(queries.RUNS)}
    await transaction.many(queries.FORGET_STATE, [("", name) for name in queries.empty_seats(state, runs)])
    await transaction.run(queries.FORGET_OLD_ANSWERS, (await transaction.now(),))


async def groups_in(transaction: Transaction, groups: Mapping[str, SqlPart], where: object) -> dict[str, SqlPart]:
    """Return the groups whose tables a database has, each with the steps that it has. `groups` are those of the installed
    plugins. Raises `StoreError` for tables of a plugin that is not installed, which could not be copied."""
    found = {}
    for name, version in await transaction.all(SELECT_VERSIONS):
        part = groups.get(name)
        if part is None or version > len(part.tables):
            raise StoreError(
                f"{where} has tables that a plugin made for its operations {name!r}, and that plugin, or a release of it that "
                "knows them, is not installed here: install it, so that they are copied too"
            )
        found[name] = SqlPart(tables=part.tables[:version])
    return found
