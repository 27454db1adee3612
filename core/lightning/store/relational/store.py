"""`RelationalStore`: the `Store` protocol as operations, for a database that only has to run them.

The invariant: every operation may be run again when nobody knows whether it was committed: by its nature, because it is known
by a name what it was answered (`answers`), or because its `again` looks first.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, Final, TypeVar, cast

from lightning.store import rollout_state, rows
from lightning.store.operation import Operation as StoreOperation
from lightning.store.operation import OperationGroup, Operations
from lightning.store.relational import records
from lightning.store.relational import rollouts as rollout_ops
from lightning.store.relational import transitions as transition_ops
from lightning.store.relational.brought import SqlPart, make_tables, version_of
from lightning.store.relational.transaction import Again, Operation, done_once
from lightning.types import Json, Lease, Outcome, Rollout, Transition

T = TypeVar("T")


READS: Final[Mapping[str, Callable[..., Coroutine[Any, Any, Any]]]] = {
    "get_run": records.get_run,
    "list_runs": records.list_runs,
    "get_rollout": rollout_ops.get,
    "list_rollouts": rollout_ops.page,
    "count_rollouts": rollout_ops.count,
    "next_seq": transition_ops.next_seq,
    "transitions": transition_ops.read,
    "transitions_of": transition_ops.read_many,
    "attempts_of": records.attempts_of,
    "steps": records.steps,
    "last_step": records.last_step,
    "metrics": records.metrics,
    "get_state": records.get_state,
}
"""What reads for an operation of the table, from a transaction and with the operation's arguments by name."""
WHOLE: Final = ("transitions", "transitions_of", "attempts_of")
"""Those of them whose statements must see one moment."""
WRITES: Final[Mapping[str, Callable[..., Coroutine[Any, Any, Any]]]] = {
    "put_run": records.put_run,
    "renew": rollout_ops.renew,
    "commit_step": records.commit_step,
}
"""What writes for an operation, in the same way."""


class RelationalStore(Operations, ABC):
    """Everything of a store but its life and its `watch`."""

    answers_get_lost: ClassVar[bool] = True
    """Whether a commit may be done and this process not hear of it: then calls that their callers did not name get a name."""

    def __init__(self) -> None:
        self._with_tables: set[OperationGroup] = set()
        """The groups whose tables are known to be there; forgotten whenever the store is opened."""

    @abstractmethod
    async def _write(
        self, operation: Operation[T], again: Again[T] | None = None, *, first: Callable[[], object] | None = None
    ) -> T:
        """Run an operation in a transaction of its own and commit it durably.

        `first` runs before the transaction, in the thread that writes: in the caller's it would compete with that one for the
        interpreter. Where the answer to a commit may get lost: `again` is run then, with the result that was lost, else the
        operation.
        """

    @abstractmethod
    async def _read(self, operation: Operation[T], *, whole: bool = False) -> T:
        """Run an operation that changes nothing. It sees every write that was acknowledged before.

        `whole`: all of its statements must see one moment.
        """

    def _known_as(self, once: str | None, method: str, *arguments: Json) -> str:
        """The name of a call that would not be the same if it were done twice; empty where that cannot happen, or does not
        matter (None)."""
        if once == "" and self.answers_get_lost:
            once = uuid.uuid4().hex
        return rollout_state.known_as(once or "", method, *arguments)

    async def call(self, operation: StoreOperation, arguments: dict[str, Any]) -> Any:
        """Run the function of an operation in a transaction."""
        read = READS.get(operation.name)
        if read is not None:
            return await self._read(lambda tx: read(tx, **arguments), whole=operation.name in WHOLE)
        if operation.group is not None:
            return await self._call_of(operation.group, operation, arguments)
        return await self._write(lambda tx: WRITES[operation.name](tx, **arguments))

    async def _call_of(self, group: OperationGroup, operation: StoreOperation, arguments: dict[str, Any]) -> Any:
        """Run a plugin's function."""
        part: SqlPart = group.part(operation, "sql", self)
        function = group.function(operation, part.functions, self)
        if group not in self._with_tables:
            if await self._read(lambda tx: version_of(tx, group.name)) != len(part.tables):
                await self._write(lambda tx: make_tables(tx, group.name, part.tables, self))
            self._with_tables.add(group)
        if self.answers_get_lost and arguments.get("once") == "":
            arguments = {**arguments, "once": uuid.uuid4().hex}
        if operation.name in part.reads:
            return await self._read(lambda tx: function(tx, **arguments), whole=operation.name in part.whole)
        return await self._write(lambda tx: function(tx, **arguments))

    # what is more than one function of a transaction -----------------------------------------------------------
    async def create_rollouts(self, rollouts: Sequence[Rollout]) -> int:
        """See `Store.create_rollouts`."""
        return await self._write(
            lambda tx: rollout_ops.create(tx, rollouts), lambda tx, new: rollout_ops.create_again(tx, new, rollouts)
        )

    async def lease(self, run: str, worker: str, *, limit: int = 1, ttl: float = 60.0, once: str = "") -> list[Lease]:
        """See `Store.lease`."""
        known_as = rollout_state.known_as(once, "lease", run, worker, ttl)
        return await self._write(
            lambda tx: rollout_ops.lease(tx, run, worker, limit, ttl, known_as),
            lambda tx, leases: rollout_ops.lease_again(tx, leases, run, worker, limit, ttl, known_as),
        )

    async def complete(self, rollout: str, attempt: int, outcome: Outcome, *, spend: bool = True) -> Rollout:
        """See `Store.complete`."""
        end = rollout_state.ending(rollout, outcome)
        return await self._write(lambda tx: rollout_ops.complete(tx, rollout, attempt, end, spend=spend))

    async def release(self, worker: str, *, once: str = "") -> int:
        """See `Store.release`."""
        known_as = self._known_as(once, "release", worker)
        return cast(
            "int",
            await self._write(lambda tx: done_once(tx, known_as, "", lambda: rollout_ops.release(tx, worker))),
        )

    async def append(self, transitions: Sequence[Transition]) -> int:
        """See `Store.append`."""
        given = rollout_state.settled(transitions)  # read after others have run, who may change a list of theirs
        calls = cache(lambda: [transition_ops.prepare(transition) for transition in given])
        return await self._write(
            lambda tx: transition_ops.append(tx, calls()),
            lambda tx, new: transition_ops.append_again(tx, new, calls()),
            first=calls,
        )

    async def log_metrics(self, run: str, step: int, values: Mapping[str, float], *, once: str = "") -> None:
        """See `Store.log_metrics`."""
        known_as = self._known_as(once, "log_metrics", run, step, dict(values))
        await self._write(lambda tx: done_once(tx, known_as, run, lambda: records.log_metrics(tx, run, step, values)))

    async def put_state(self, run: str, key: str, value: Json, *, once: str | None = "") -> None:
        """See `Store.put_state`."""
        text = rows.dump(value, f"the state {key!r}")
        known_as = self._known_as(once, "put_state", run, key, text)
        await self._write(lambda tx: done_once(tx, known_as, run, lambda: records.put_state(tx, run, key, text)))

    async def keep_state(self, run: str, key: str, value: Json) -> Json:
        """See `Store.keep_state`."""
        text = rows.dump(value, f"the state {key!r}")
        return await self._write(lambda tx: records.keep_state(tx, run, key, text))
