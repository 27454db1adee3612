"""`RelationalStore`: the `Store` protocol for a database that only has to run operations.

The invariant: every operation may be run again when nobody knows whether it was committed, by its nature or because it is
known by a name what it was answered (`answers`); a lease without a name is another one, and what was new is so no more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from lightning.store import rollout_state, rows
from lightning.store.operation import Operation as StoreOperation
from lightning.store.operation import OperationGroup, Operations
from lightning.store.relational import operations
from lightning.store.relational.transaction import Operation, SqlPart, Transaction, make_tables, version_of
from lightning.types import Json, Outcome, Rollout, Transition

T = TypeVar("T")
OWN: Final = SqlPart(
    reads={
        "get_run": operations.get_run,
        "list_runs": operations.list_runs,
        "get_rollout": operations.get_rollout,
        "list_rollouts": operations.list_rollouts,
        "count_rollouts": operations.count_rollouts,
        "next_seq": operations.next_seq,
        "transitions": operations.transitions,
        "transitions_of": operations.transitions_of,
        "attempts_of": operations.attempts_of,
        "steps": operations.steps,
        "last_step": operations.last_step,
        "metrics": operations.metrics,
        "get_state": operations.get_state,
    },
    writes={
        "put_run": operations.put_run,
        "create_rollouts": operations.create_rollouts,
        "lease": operations.lease,
        "renew": operations.renew,
        "release": operations.release,
        "commit_step": operations.commit_step,
        "log_metrics": operations.log_metrics,
    },
    whole=("transitions", "transitions_of", "attempts_of"),
)
"""The functions of a transaction that do the store's own operations, but for those that are methods of `RelationalStore`."""


class _TakenBackError(Exception):
    """Ends a transaction of which nothing is kept but the answer, its one argument."""


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
            return found.args[0]

    async def complete(self, rollout: str, attempt: int, outcome: Outcome, *, spend: bool = True) -> Rollout:
        """See `Store.complete`."""
        end = rollout_state.ending(rollout, outcome)  # before the transaction, which keeps others from writing
        return await self._write(partial(operations.complete, rollout=rollout, attempt=attempt, end=end, spend=spend))

    async def append(self, transitions: Sequence[Transition]) -> int:
        """See `Store.append`."""
        given = rollout_state.settled(transitions)  # read after others have run, who may change a list of theirs
        calls: list[operations.NewCall] = []
        return await self._write(
            partial(operations.append, calls=calls), first=lambda: calls.extend(map(operations.prepare, given))
        )

    async def put_state(self, run: str, key: str, value: Json, *, once: str | None = "") -> None:
        """See `Store.put_state`."""
        await self._write(
            partial(operations.put_state, run=run, key=key, text=rows.dump(value, f"the state {key!r}"), once=once)
        )

    async def keep_state(self, run: str, key: str, value: Json) -> Json:
        """See `Store.keep_state`."""
        return await self._write(
            partial(operations.keep_state, run=run, key=key, text=rows.dump(value, f"the state {key!r}"))
        )
