"""`RelationalStore`: the `Store` protocol as operations, for a database that only has to run them; and the operations on runs,
committed steps, metrics and small state.

The invariant: every operation may be run again when nobody knows whether it was committed, by its nature or because it is
known by a name what it was answered (`answers`); a lease without a name is another one, and what was new is so no more. A step
and the marks of the rollouts it trained are written together or not at all, and a rollout is marked once: with its first step.
It enters another one only where that declares it, and only so often (`rollout_state.Reuse`).
"""

from __future__ import annotations

import itertools
import json
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

from lightning.store import rollout_state, rows, sql
from lightning.store.operation import Operation as StoreOperation
from lightning.store.operation import OperationGroup, Operations
from lightning.store.protocol import Attempt, MetricPoint
from lightning.store.relational import rollouts as rollout_ops
from lightning.store.relational.transaction import Operation, SqlPart, Transaction, make_tables, once_only, version_of
from lightning.store.rows import Row
from lightning.types import Json, Run, StepRecord, Transition

T = TypeVar("T")
IDS_AT_ONCE: Final = 500
"""Ids in one statement at most."""


async def put_run(transaction: Transaction, run: Run) -> Run:
    """See `Store.put_run`. A run without a time of its own is created now."""
    created = replace(run, created_at=run.created_at or await transaction.now())
    await transaction.run(sql.INSERT_RUN, rows.RUNS.values(created))
    stored = await get_run(transaction, run.id)
    assert stored is not None, "the run was inserted in this transaction or before"
    return stored


async def get_run(transaction: Transaction, run: str) -> Run | None:
    """See `Store.get_run`."""
    row = await transaction.one(f"SELECT {sql.RUN_COLUMNS} FROM runs WHERE id = ?", (run,))  # noqa: S608
    return None if row is None else rows.RUNS.read(row)


async def list_runs(
    transaction: Transaction, project: str | None, after: str, limit: int | None, brief: bool
) -> list[Run]:
    """See `Store.list_runs`."""
    rollout_state.check_page(limit)
    given: dict[str, Row] = {} if project is None else {"project = ?": (project,)}
    if after:
        place = await transaction.one("SELECT created_at, n, project FROM runs WHERE id = ?", (after,))
        if place is None or project not in (None, place[2]):
            raise rollout_state.no_cursor(after)
        given["(created_at, n) < (?, ?)"] = tuple(place[:2])
    where = f" WHERE {' AND '.join(given)}" if given else ""
    columns = sql.BRIEF_RUN_COLUMNS if brief else sql.RUN_COLUMNS
    found = await transaction.all(
        f"SELECT {columns} FROM runs{where} ORDER BY created_at DESC, n DESC LIMIT ?",  # noqa: S608
        (*itertools.chain(*given.values()), limit or sql.ALL),
    )
    return [rows.RUNS.read(row) for row in found]


async def attempts_of(transaction: Transaction, attempts: Sequence[tuple[str, int | None]]) -> list[Attempt]:
    """See `Store.attempts_of`."""
    found: list[Attempt] = []
    for start in range(0, len(attempts), IDS_AT_ONCE):
        asked = attempts[start : start + IDS_AT_ONCE]
        names = list(dict.fromkeys(rollout for rollout, _ in asked))
        places = sql.places(len(names))
        current: dict[str, int] = {
            row[0]: row[1]
            for row in await transaction.all(f"SELECT id, attempt FROM rollouts WHERE id IN {places}", names)  # noqa: S608
        }
        kept = {(row[0], row[1]): row for row in await transaction.all(sql.SELECT_ATTEMPTS + places, names)}
        for rollout, attempt in asked:
            if rollout not in current:
                raise rollout_state.unknown_rollout(rollout)
            number = current[rollout] if attempt is None else attempt
            row = kept.get((rollout, number))
            found.append(Attempt(rollout, number) if row is None else rows.ATTEMPTS.read(row))
    return found


async def commit_step(transaction: Transaction, record: StepRecord) -> None:
    """See `Store.commit_step`. A record without a time of its own is committed now."""
    await transaction.alone(f"steps {record.run}")
    earlier = await transaction.one("SELECT digest FROM steps WHERE run = ? AND step = ?", (record.run, record.step))
    if earlier is not None:
        if earlier[0] != record.digest:
            raise rollout_state.committed_otherwise(record, earlier[0])
        return
    trained, reuse, first = sorted(record.rollouts), rollout_state.reuse_of(record), record.step
    for (rollout, _), (following, _) in itertools.pairwise(trained):
        if rollout == following:
            raise rollout_state.named_twice(record, rollout)
    for start in range(0, len(trained), IDS_AT_ONCE):
        some = trained[start : start + IDS_AT_ONCE]
        names = [rollout for rollout, _ in some]
        locked = await transaction.locked(
            # In the order of their ids, so that two transactions that share some do not wait for one another.
            "SELECT id, run, status, fault, attempt, trained_at_step FROM rollouts "  # noqa: S608
            f"WHERE id IN {sql.places(len(names))} ORDER BY id",
            names,
        )
        standing = {row[0]: row[1:] for row in locked}
        for rollout, attempt in some:
            first = min(first, _check_trainable(record, rollout, attempt, standing.get(rollout), reuse))
        if new := [name for name in names if name not in reuse.rollouts]:
            await transaction.run(
                f"UPDATE rollouts SET trained_at_step = ? WHERE id IN {sql.places(len(new))}",  # noqa: S608
                (record.step, *new),
            )
    await _check_uses(transaction, record, reuse, first)
    committed = replace(record, at=record.at or await transaction.now())
    await transaction.run(sql.INSERT_STEP, rows.STEPS.values(committed))
    await transaction.changed(record.run)


def _check_trainable(
    record: StepRecord, rollout: str, attempt: int, found: Row | None, reuse: rollout_state.Reuse
) -> int:
    """The first step that trained it, this one or the one before that a reuse is of."""
    if found is None:
        raise rollout_state.unknown_rollout(rollout)
    run, status, fault, current, trained = found
    rollout_state.check_trainable(record, rollout, attempt, run, status, fault, current)
    declared = rollout in reuse.rollouts
    if declared != (trained is not None and trained < record.step) or (not declared and trained is not None):
        raise rollout_state.not_new(record, rollout, trained, declared=declared)
    return trained if declared else record.step


async def _check_uses(transaction: Transaction, record: StepRecord, reuse: rollout_state.Reuse, first: int) -> None:
    """Refuse a reuse beyond its limit. Steps before `first` trained none of what is reused."""
    if not reuse.rollouts:
        return
    uses = Counter[str]()
    for (text,) in await transaction.all("SELECT rollouts FROM steps WHERE run = ? AND step >= ?", (record.run, first)):
        uses.update(name for name, _ in json.loads(text) if name in reuse.rollouts)
    for rollout, steps in sorted(uses.items()):
        if steps > reuse.limit:
            raise rollout_state.used_up(record, rollout, steps, reuse.limit)


async def steps(transaction: Transaction, run: str, after: int, limit: int | None, brief: bool) -> list[StepRecord]:
    """See `Store.steps`."""
    rollout_state.check_page(limit)
    columns = sql.BRIEF_STEP_COLUMNS if brief else sql.STEP_COLUMNS
    found = await transaction.all(
        f"SELECT {columns} FROM steps WHERE run = ? AND step > ? ORDER BY step LIMIT ?",  # noqa: S608
        (run, after, limit or sql.ALL),
    )
    return [rows.STEPS.read(row) for row in found]


async def last_step(transaction: Transaction, run: str) -> StepRecord | None:
    """See `Store.last_step`."""
    row = await transaction.one(
        f"SELECT {sql.STEP_COLUMNS} FROM steps WHERE run = ? ORDER BY step DESC LIMIT 1",  # noqa: S608
        (run,),
    )
    return None if row is None else rows.STEPS.read(row)


@once_only
async def log_metrics(transaction: Transaction, run: str, step: int, values: Mapping[str, float]) -> None:
    """See `Store.log_metrics`."""
    now = await transaction.now()
    await transaction.many(
        "INSERT INTO metrics (run, step, name, value, at) VALUES (?, ?, ?, ?, ?) "
        "ON CONFLICT (run, step, name) DO UPDATE SET value = excluded.value, at = excluded.at",
        [(run, step, name, float(value), now) for name, value in sorted(values.items())],
    )


async def metrics(transaction: Transaction, run: str) -> list[MetricPoint]:
    """See `Store.metrics`."""
    steps: dict[int, dict[str, float]] = {}
    times: dict[int, float] = {}
    for step, name, value, at in await transaction.all(
        "SELECT step, name, value, at FROM metrics WHERE run = ? ORDER BY step, name", (run,)
    ):
        steps.setdefault(step, {})[name] = math.nan if value is None else value
        times[step] = max(at, times.get(step, at))
    return [MetricPoint(step, values, times[step]) for step, values in steps.items()]


@once_only
async def put_state(transaction: Transaction, run: str, key: str, value: Json) -> None:
    """See `Store.put_state`."""
    await transaction.run(
        "INSERT INTO state (run, name, value) VALUES (?, ?, ?) ON CONFLICT (run, name) DO UPDATE SET value = excluded.value",
        (run, key, rows.dump(value, f"the state {key!r}")),
    )
    await transaction.changed(run)


async def keep_state(transaction: Transaction, run: str, key: str, value: Json) -> Json:
    """See `Store.keep_state`."""
    if await transaction.run(
        "INSERT INTO state (run, name, value) VALUES (?, ?, ?) ON CONFLICT (run, name) DO NOTHING",
        (run, key, rows.dump(value, f"the state {key!r}")),
    ):
        await transaction.changed(run)
    return await get_state(transaction, run, key)


async def get_state(transaction: Transaction, run: str, key: str) -> Json:
    """See `Store.get_state`."""
    row = await transaction.one("SELECT value FROM state WHERE run = ? AND name = ?", (run, key))
    return None if row is None else rows.load(row[0], f"the state {key!r} of run {run!r}")


READS: Final[Mapping[str, Callable[..., Coroutine[Any, Any, Any]]]] = {
    "get_run": get_run,
    "list_runs": list_runs,
    "get_rollout": rollout_ops.get,
    "list_rollouts": rollout_ops.page,
    "count_rollouts": rollout_ops.count,
    "next_seq": rollout_ops.next_seq,
    "transitions": rollout_ops.transitions,
    "transitions_of": rollout_ops.transitions_of,
    "attempts_of": attempts_of,
    "steps": steps,
    "last_step": last_step,
    "metrics": metrics,
    "get_state": get_state,
}
"""What reads for an operation of the table, from a transaction and with the operation's arguments by name."""
WRITES: Final[Mapping[str, Callable[..., Coroutine[Any, Any, Any]]]] = {
    "put_run": put_run,
    "create_rollouts": rollout_ops.create,
    "lease": rollout_ops.lease,
    "renew": rollout_ops.renew,
    "complete": rollout_ops.complete,
    "release": rollout_ops.release,
    "commit_step": commit_step,
    "log_metrics": log_metrics,
    "put_state": put_state,
    "keep_state": keep_state,
}
"""What writes for an operation, in the same way."""
OWN: Final = SqlPart(READS, WRITES, whole=("transitions", "transitions_of", "attempts_of"))


class _TakenBackError(Exception):
    """Ends a transaction of which nothing is kept but the answer."""

    def __init__(self, answer: Any) -> None:
        super().__init__("taken back")
        self.answer = answer


class RelationalStore(Operations, ABC):
    """Everything of a store but its life and its `watch`."""

    def __init__(self) -> None:
        self._with_tables: set[OperationGroup] = set()
        """The groups whose tables are known to be there; forgotten whenever the store is opened."""
        self._has_written = False
        """Whether anything was committed here: who has only looked makes no tables."""

    @abstractmethod
    async def _write(self, operation: Operation[T], *, first: Callable[[], object] | None = None) -> T:
        """Run an operation in a transaction of its own and commit it durably.

        `first` runs before the transaction, in the thread that writes: in the caller's it would compete with that one for the
        interpreter.
        """

    @abstractmethod
    async def _read(self, operation: Operation[T], *, whole: bool = False) -> T:
        """Run an operation that changes nothing. It sees every write that was acknowledged before.

        `whole`: all of its statements must see one moment.
        """

    async def call(self, operation: StoreOperation, arguments: dict[str, Any]) -> Any:
        """Run the function of an operation in a transaction."""
        if operation.group is not None:
            return await self._call_of(operation.group, operation, arguments)
        return await self._run(OWN, operation.name, partial(OWN.functions[operation.name], **arguments))

    async def _run(self, part: SqlPart, name: str, work: Operation[Any]) -> Any:
        if name in part.reads:
            return await self._read(work, whole=name in part.whole)
        return await self._write(work)

    async def _call_of(self, group: OperationGroup, operation: StoreOperation, arguments: dict[str, Any]) -> Any:
        """Run a plugin's function."""
        part: SqlPart = group.part(operation, "sql", self)
        work = partial(group.function(operation, part.functions, self), **arguments)
        if group not in self._with_tables:
            there = await self._read(partial(version_of, group=group.name))
            if operation.name in part.reads and there < len(part.tables) and not self._has_written:
                return await self._read_of_nothing(group, part, work)
            if there != len(part.tables):
                await self._write(partial(make_tables, group=group.name, tables=part.tables, where=self))
            self._with_tables.add(group)
        return await self._run(part, operation.name, work)

    async def _read_of_nothing(self, group: OperationGroup, part: SqlPart, read: Operation[Any]) -> Any:
        """The answer of a reading operation whose tables are not there yet, in a process that has only looked so far. They are
        made for it and taken back, since such a process changes nothing of a database."""

        async def look(transaction: Transaction) -> None:
            await make_tables(transaction, group.name, part.tables, self)
            raise _TakenBackError(await read(transaction))

        try:
            await self._write(look)
        except _TakenBackError as found:
            return found.answer

    async def append(self, transitions: Sequence[Transition]) -> int:
        """See `Store.append`."""
        given = rollout_state.settled(transitions)  # read after others have run, who may change a list of theirs
        calls: list[rollout_ops.NewCall] = []
        work = partial(rollout_ops.append, calls=calls)
        return await self._write(work, first=lambda: calls.extend(map(rollout_ops.prepare, given)))
