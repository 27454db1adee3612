"""`RelationalStore`: the `Store` protocol as operations, for a database that only has to run them.

The invariant: every operation may be run again when nobody knows whether it was committed: by its nature, because it is known
by a name what it was answered (`answers`), or because its `again` looks first.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import ClassVar, TypeVar, cast

from lightning.store import json_text, rollout_state
from lightning.store.protocol import LATEST, Alias, Attempt, MetricPoint, Page, ResourceUse, RolloutCount
from lightning.store.relational import records
from lightning.store.relational import resources as resource_ops
from lightning.store.relational import rollouts as rollout_ops
from lightning.store.relational import transitions as transition_ops
from lightning.store.relational.transaction import Again, Operation, done_once
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
    Token,
    Transition,
)

T = TypeVar("T")


class RelationalStore(ABC):
    """Everything of a store but its life and its `watch`."""

    answers_get_lost: ClassVar[bool] = True
    """Whether a commit may be done and this process not hear of it: then calls that their callers did not name get a name."""

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

    # runs -------------------------------------------------------------------------------------------------------
    async def put_run(self, run: Run) -> Run:
        """See `Store.put_run`."""
        return await self._write(lambda tx: records.put_run(tx, run))

    async def get_run(self, run: str) -> Run | None:
        """See `Store.get_run`."""
        return await self._read(lambda tx: records.get_run(tx, run))

    async def list_runs(
        self, project: str | None = None, *, after: str = "", limit: int | None = None, brief: bool = False
    ) -> list[Run]:
        """See `Store.list_runs`."""
        return await self._read(lambda tx: records.list_runs(tx, project, after, limit, brief))

    # rollouts ---------------------------------------------------------------------------------------------------
    async def create_rollouts(self, rollouts: Sequence[Rollout]) -> int:
        """See `Store.create_rollouts`."""
        return await self._write(
            lambda tx: rollout_ops.create(tx, rollouts), lambda tx, new: rollout_ops.create_again(tx, new, rollouts)
        )

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

    async def count_rollouts(self, run: str) -> list[RolloutCount]:
        """See `Store.count_rollouts`."""
        return await self._read(lambda tx: rollout_ops.count(tx, run))

    async def lease(self, run: str, worker: str, *, limit: int = 1, ttl: float = 60.0, once: str = "") -> list[Lease]:
        """See `Store.lease`."""
        known_as = rollout_state.known_as(once, "lease", run, worker, ttl)
        return await self._write(
            lambda tx: rollout_ops.lease(tx, run, worker, limit, ttl, known_as),
            lambda tx, leases: rollout_ops.lease_again(tx, leases, run, worker, limit, ttl, known_as),
        )

    async def renew(self, lease: Lease, *, ttl: float = 60.0) -> Lease:
        """See `Store.renew`."""
        return await self._write(lambda tx: rollout_ops.renew(tx, lease, ttl))

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

    # transitions ------------------------------------------------------------------------------------------------
    async def append(self, transitions: Sequence[Transition]) -> int:
        """See `Store.append`."""
        given = tuple(transitions)  # it is read after others have run, who may change a list of theirs
        calls = cache(lambda: [transition_ops.prepare(transition) for transition in given])
        return await self._write(
            lambda tx: transition_ops.append(tx, calls()),
            lambda tx, new: transition_ops.append_again(tx, new, calls()),
            first=calls,
        )

    async def next_seq(self, rollout: str, attempt: int) -> int:
        """See `Store.next_seq`."""
        return await self._read(lambda tx: transition_ops.next_seq(tx, rollout, attempt))

    async def transitions(self, rollout: str, attempt: int | None = None) -> list[Transition]:
        """See `Store.transitions`."""
        return await self._read(lambda tx: transition_ops.read(tx, rollout, attempt), whole=True)

    async def transitions_of(self, attempts: Sequence[tuple[str, int]]) -> list[list[Transition]]:
        """See `Store.transitions_of`."""
        return await self._read(lambda tx: transition_ops.read_many(tx, attempts), whole=True)

    async def attempts_of(self, attempts: Sequence[tuple[str, int | None]]) -> list[Attempt]:
        """See `Store.attempts_of`."""
        return await self._read(lambda tx: records.attempts_of(tx, attempts), whole=True)

    # spans ------------------------------------------------------------------------------------------------------
    async def append_spans(self, spans: Sequence[Span]) -> int:
        """See `Store.append_spans`."""
        return await self._write(lambda tx: transition_ops.append_spans(tx, spans))

    async def spans(self, rollout: str, attempt: int | None = None) -> list[Span]:
        """See `Store.spans`."""
        return await self._read(lambda tx: transition_ops.read_spans(tx, rollout, attempt))

    # steps, metrics, small state --------------------------------------------------------------------------------
    async def commit_step(self, record: StepRecord) -> None:
        """See `Store.commit_step`."""
        await self._write(lambda tx: records.commit_step(tx, record))

    async def steps(
        self, run: str, *, after: int = -1, limit: int | None = None, brief: bool = False
    ) -> list[StepRecord]:
        """See `Store.steps`."""
        return await self._read(lambda tx: records.steps(tx, run, after, limit, brief))

    async def last_step(self, run: str) -> StepRecord | None:
        """See `Store.last_step`."""
        return await self._read(lambda tx: records.last_step(tx, run))

    async def log_metrics(self, run: str, step: int, values: Mapping[str, float], *, once: str = "") -> None:
        """See `Store.log_metrics`."""
        known_as = self._known_as(once, "log_metrics", run, step, dict(values))
        await self._write(lambda tx: done_once(tx, known_as, run, lambda: records.log_metrics(tx, run, step, values)))

    async def metrics(self, run: str) -> list[MetricPoint]:
        """See `Store.metrics`."""
        return await self._read(lambda tx: records.metrics(tx, run))

    async def put_state(self, run: str, key: str, value: Json, *, once: str | None = "") -> None:
        """See `Store.put_state`."""
        text = json_text.dump(value, f"the state {key!r}")
        known_as = self._known_as(once, "put_state", run, key, text)
        await self._write(lambda tx: done_once(tx, known_as, run, lambda: records.put_state(tx, run, key, text)))

    async def keep_state(self, run: str, key: str, value: Json) -> Json:
        """See `Store.keep_state`."""
        text = json_text.dump(value, f"the state {key!r}")
        return await self._write(lambda tx: records.keep_state(tx, run, key, text))

    async def get_state(self, run: str, key: str) -> Json:
        """See `Store.get_state`."""
        return await self._read(lambda tx: records.get_state(tx, run, key))

    # tokens -----------------------------------------------------------------------------------------------------
    async def put_token(self, token: Token, *, once: str = "") -> Token:
        """See `Store.put_token`."""
        known_as = self._known_as(once, "put_token", token.id, token.digest, token.scope.value, token.project)
        return await self._write(lambda tx: records.put_token(tx, token, known_as))

    async def get_token(self, token: str) -> Token | None:
        """See `Store.get_token`."""
        return await self._read(lambda tx: records.get_token(tx, token))

    async def list_tokens(self) -> list[Token]:
        """See `Store.list_tokens`."""
        return await self._read(records.list_tokens)

    async def revoke_token(self, token: str) -> Token:
        """See `Store.revoke_token`."""
        return await self._write(lambda tx: records.revoke_token(tx, token))

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

    async def set_alias(self, name: str, alias: str, version: int, *, once: str = "") -> Alias:
        """See `Store.set_alias`."""
        known_as = self._known_as(once, "set_alias", name, alias, version)
        return await self._write(lambda tx: resource_ops.set_alias(tx, name, alias, version, known_as))

    async def roll_back_alias(self, name: str, alias: str, *, once: str = "") -> Alias:
        """See `Store.roll_back_alias`."""
        known_as = self._known_as(once, "roll_back_alias", name, alias)
        return await self._write(lambda tx: resource_ops.roll_back(tx, name, alias, known_as))

    async def list_aliases(self, name: str | None = None) -> list[Alias]:
        """See `Store.list_aliases`."""
        return await self._read(lambda tx: resource_ops.aliases(tx, name))

    async def alias_history(self, name: str, alias: str) -> list[Alias]:
        """See `Store.alias_history`."""
        return await self._read(lambda tx: resource_ops.history(tx, name, alias))

    async def resource_uses(self, name: str) -> list[ResourceUse]:
        """See `Store.resource_uses`."""
        return await self._read(lambda tx: resource_ops.uses(tx, name))
