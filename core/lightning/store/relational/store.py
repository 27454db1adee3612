"""`RelationalStore`: the `Store` protocol for a database that only has to run operations in transactions.

The invariant: an operation may be run again if it is unknown whether it was committed. Either it changes nothing the second
time, or its answer is kept under the name of the call (table `answers`). A lease without a name takes other rollouts, and a
repeated call counts nothing as new.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from lightning.store import rollout_state, rows
from lightning.store.codec import LatePrompts
from lightning.store.operation import Operation as StoreOperation
from lightning.store.operation import OperationGroup, Operations
from lightning.store.relational import operations
from lightning.store.relational.transaction import Operation, SqlPart, Transaction, make_tables, version_of
from lightning.types import Outcome, Rollout, Transition

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
        "put_state": operations.put_state,
        "keep_state": operations.keep_state,
    },
    whole=("transitions", "transitions_of", "attempts_of"),
)
"""The functions of a transaction that do the store's own operations, but for those that are methods of `RelationalStore`."""


class _TakenBackError(Exception):
    """Rolls a transaction back and carries its answer, the one argument."""


class RelationalStore(Operations, ABC):
    """A store without `open`, `close` and `watch`. A subclass runs operations with `_write` and `_read`."""

    def __init__(self) -> None:
        self._with_tables: set[OperationGroup] = set()
        """The groups whose tables are known to exist; emptied whenever the store is opened."""
        self._has_written = False
        """Whether this object has committed anything. Until it has, it makes no tables for reading operations."""
        self._late = LatePrompts()

    @abstractmethod
    async def _write(self, operation: Operation[T], *, first: Callable[[], object] | None = None) -> T:
        """Run an operation in its own transaction, commit it durably, and return its result.

        `first` runs before the transaction, in the writing thread: in the caller's thread it would compete with that thread for
        the interpreter.
        """

    @abstractmethod
    async def _read(self, operation: Operation[T], *, whole: bool = False) -> T:
        """Run an operation that changes nothing, and return its result. It sees every write that was acknowledged before.

        With `whole` all statements of the operation see one snapshot.
        """

    async def call(self, operation: StoreOperation, arguments: dict[str, Any]) -> Any:
        """Run the function of an operation in a transaction."""
        if operation.group is not None:
            return await self._call_of(operation.group, operation, arguments)
        if "value" in arguments:  # a value of the state becomes JSON before the transaction, during which others wait
            arguments = {**arguments, "value": rows.dump(arguments["value"], f"the state {arguments['key']!r}")}
        return await self._run(OWN, operation.name, partial(OWN.functions[operation.name], **arguments))

    async def _run(self, part: SqlPart, name: str, work: Operation[Any]) -> Any:
        if name in part.reads:
            return await self._read(work, whole=name in part.whole)
        return await self._write(work)

    async def _call_of(self, group: OperationGroup, operation: StoreOperation, arguments: dict[str, Any]) -> Any:
        """Run the function of a plugin's operation, after making the tables that it needs."""
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
        """Return the answer of a reading operation whose tables do not exist yet. They are made and rolled back again, because
        a process that has only read must not change the database."""

        async def look(transaction: Transaction) -> None:
            await make_tables(transaction, group.name, part.tables, self)
            raise _TakenBackError(await read(transaction))

        try:
            await self._write(look)
        except _TakenBackError as found:
            return found.args[0]

    async def complete(self, rollout: str, attempt: int, outcome: Outcome, *, spend: bool = True) -> Rollout:
        """End an attempt and store its outcome (`Store.complete`)."""
        end = rollout_state.ending(rollout, outcome)  # before the transaction, which keeps others from writing
        return await self._write(partial(operations.complete, rollout=rollout, attempt=attempt, end=end, spend=spend))

    async def append(self, transitions: Sequence[Transition]) -> int:
        """Store calls and return how many are new (`Store.append`)."""
        given = rollout_state.settled(transitions)  # read after others have run, who may change a list of theirs
        calls: list[operations.NewCall] = []
        return await self._write(
            partial(operations.append, calls=calls),
            first=lambda: calls.extend(operations.prepare(each, self._late) for each in given),
        )
