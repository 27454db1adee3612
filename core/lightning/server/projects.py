"""The store as one project sees it: the one place that keeps projects apart.

The invariant: what belongs to another project answers exactly as what was never created, whichever method is asked; a secret
in a run's state, and what servers keep there for one another, is told to nobody. Only an id that one asks to *create* can be
found to be taken elsewhere, since the ids of runs and rollouts are one name space.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace

from lightning.errors import ConflictError, DataError, StoreError
from lightning.server.names import KnownIds, Names, check_id, check_run_id, is_of_servers
from lightning.store.protocol import (
    LATEST,
    Alias,
    Attempt,
    MetricPoint,
    Page,
    ResourceUse,
    RolloutCount,
    RunWatch,
    Store,
)
from lightning.store.rollout_state import unknown_rollout
from lightning.types import (
    DEFAULT_PROJECT,
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

VIEWS = 1024
WHOLE_STORE = ""
"""The `run` of state that belongs to no run."""


def is_secret(key: str) -> bool:
    """Whether a key of a run's state holds what no token may read or change, such as `gateway_secret`."""
    return "secret" in key.lower()


def of_project(store: Store, project: str) -> Store:
    """A store as `project` sees it, where it shows names as they are stored or is such a view already. The default project's
    is the store itself: its names are stored as they are."""
    if project == DEFAULT_PROJECT or (isinstance(store, ProjectStore) and store.project is not None):
        return store
    return ProjectStore(store, project)


class Projects:
    """The views of one store, kept so that each remembers what it has looked up."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._views: OrderedDict[str | None, ProjectStore] = OrderedDict()

    def of(self, project: str | None) -> ProjectStore:
        """The store as `project` sees it; None sees all projects, and no secret either."""
        view = self._views.get(project)
        if view is None:
            view = self._views[project] = ProjectStore(self._store, project)
            if len(self._views) > VIEWS:
                self._views.popitem(last=False)
        self._views.move_to_end(project)
        return view


class ProjectStore:
    """A `Store` of one project over a store of many; with `project=None` of all. Opening and closing are the owner's affair."""

    def __init__(self, store: Store, project: str | None) -> None:
        self._store, self._project = store, project
        self._names = Names(project)
        self._known = KnownIds()

    @property
    def project(self) -> str | None:
        """The project that is seen; None: all."""
        return self._project

    async def open(self) -> None:
        """Nothing: the store under it is open as long as its owner wants."""

    async def close(self) -> None:
        """Nothing: others look at the store under it too."""

    # what is seen -----------------------------------------------------------------------------------------------
    async def _sees_run(self, run: str) -> bool:
        if is_of_servers(run):
            return False
        if self._project is None:
            return True
        if self._known.has("run", run):
            return True
        found = await self._store.get_run(run) if run != WHOLE_STORE else None
        if found is None or found.project != self._project:
            return False
        self._known.add("run", [run])
        return True

    async def _sees(self, rollout: str) -> bool:
        if self._project is None:
            return True
        if self._known.has("rollout", rollout):
            return True
        found = await self._store.get_rollout(rollout)
        if found is None or not await self._sees_run(found.run):
            return False
        self._known.add("rollout", [rollout])
        return True

    async def _check_run(self, run: str) -> None:
        if not await self._sees_run(run):
            raise StoreError(f"run {run!r} is unknown: create it with put_run() first")

    async def _check(self, *rollouts: str) -> None:
        for rollout in dict.fromkeys(rollouts):
            if not await self._sees(rollout):
                raise unknown_rollout(rollout)

    # runs -------------------------------------------------------------------------------------------------------
    async def put_run(self, run: Run) -> Run:
        """See `Store.put_run`. A run that names no project becomes one of this; raises `DataError` for another's,
        `ConflictError` when another project has the id."""
        check_run_id(run.id)
        if self._project is None:
            return await self._store.put_run(run)
        if run.project not in (DEFAULT_PROJECT, self._project):
            raise DataError(f"run {run.id!r} is of project {run.project!r}, and the token of {self._project!r}")
        stored = await self._store.put_run(replace(run, project=self._project))
        if stored.project != self._project:
            raise ConflictError(f"the id {run.id!r} of a run is taken: choose another one")
        return stored

    async def get_run(self, run: str) -> Run | None:
        """See `Store.get_run`."""
        found = await self._store.get_run(run)
        return found if found is None or self._project in (None, found.project) else None

    async def list_runs(
        self, project: str | None = None, *, after: str = "", limit: int | None = None, brief: bool = False
    ) -> list[Run]:
        """See `Store.list_runs`."""
        if self._project is None:
            return await self._store.list_runs(project, after=after, limit=limit, brief=brief)
        if project not in (None, self._project):
            return []
        return await self._store.list_runs(self._project, after=after, limit=limit, brief=brief)

    def watch(self, run: str) -> AbstractAsyncContextManager[RunWatch]:
        """See `Store.watch`. Entering it raises `StoreError` for a run that is not there."""
        return self._watch(run)

    @asynccontextmanager
    async def _watch(self, run: str) -> AsyncIterator[RunWatch]:
        await self._check_run(run)
        async with self._store.watch(run) as watch:
            yield watch

    # rollouts ---------------------------------------------------------------------------------------------------
    async def create_rollouts(self, rollouts: Sequence[Rollout]) -> int:
        """See `Store.create_rollouts`. Raises `StoreError` for a run that is not there."""
        for run in dict.fromkeys(rollout.run for rollout in rollouts):
            await self._check_run(run)
        for rollout in rollouts:
            check_id(rollout.id, "rollout")
        try:
            return await self._store.create_rollouts([self._names.rollout_in(rollout) for rollout in rollouts])
        except ConflictError as error:
            raise ConflictError(
                "no rollout was created: another run has one with an id of these. Begin the ids of rollouts with the id "
                "of their run"
            ) from error

    async def get_rollout(self, rollout: str) -> Rollout | None:
        """See `Store.get_rollout`."""
        found = await self._store.get_rollout(rollout)
        if found is None or not await self._sees_run(found.run):
            return None
        return self._names.rollout_out(found)

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
        if not await self._sees_run(run):
            return Page(())
        page = await self._store.list_rollouts(run, split=split, step=step, status=status, cursor=cursor, limit=limit)
        if self._project is not None:
            self._known.add("rollout", [rollout.id for rollout in page.rollouts])
        return replace(page, rollouts=tuple(self._names.rollout_out(rollout) for rollout in page.rollouts))

    async def count_rollouts(self, run: str) -> list[RolloutCount]:
        """See `Store.count_rollouts`."""
        return await self._store.count_rollouts(run) if await self._sees_run(run) else []

    async def lease(self, run: str, worker: str, *, limit: int = 1, ttl: float = 60.0, once: str = "") -> list[Lease]:
        """See `Store.lease`. Workers of two projects may have one name and stay two."""
        if not await self._sees_run(run):
            return []
        check_id(worker, "worker")
        leases = await self._store.lease(run, self._names.worker_in(worker), limit=limit, ttl=ttl, once=once)
        return [self._names.lease_out(lease) for lease in leases]

    async def renew(self, lease: Lease, *, ttl: float = 60.0) -> Lease:
        """See `Store.renew`."""
        await self._check(lease.rollout.id)
        held = await self._store.renew(self._names.lease_in(lease), ttl=ttl)
        return self._names.lease_out(held)

    async def complete(self, rollout: str, attempt: int, outcome: Outcome, *, spend: bool = True) -> Rollout:
        """See `Store.complete`."""
        await self._check(rollout)
        return self._names.rollout_out(await self._store.complete(rollout, attempt, outcome, spend=spend))

    async def release(self, worker: str, *, once: str = "") -> int:
        """See `Store.release`: of this project's workers the one with the name."""
        return await self._store.release(self._names.worker_in(worker), once=once)

    # transitions ------------------------------------------------------------------------------------------------
    async def append(self, transitions: Sequence[Transition]) -> int:
        """See `Store.append`."""
        await self._check(*(transition.rollout for transition in transitions))
        return await self._store.append(transitions)

    async def next_seq(self, rollout: str, attempt: int) -> int:
        """See `Store.next_seq`."""
        return await self._store.next_seq(rollout, attempt) if await self._sees(rollout) else 0

    async def transitions(self, rollout: str, attempt: int | None = None) -> list[Transition]:
        """See `Store.transitions`."""
        await self._check(rollout)
        return await self._store.transitions(rollout, attempt)

    async def transitions_of(self, attempts: Sequence[tuple[str, int]]) -> list[list[Transition]]:
        """See `Store.transitions_of`."""
        await self._check(*(rollout for rollout, _ in attempts))
        return await self._store.transitions_of(attempts)

    async def attempts_of(self, attempts: Sequence[tuple[str, int | None]]) -> list[Attempt]:
        """See `Store.attempts_of`."""
        await self._check(*(rollout for rollout, _ in attempts))
        return await self._store.attempts_of(attempts)

    # spans ------------------------------------------------------------------------------------------------------
    async def append_spans(self, spans: Sequence[Span]) -> int:
        """See `Store.append_spans`: those of other projects are refused as those of unknown rollouts are."""
        seen = {rollout: await self._sees(rollout) for rollout in dict.fromkeys(span.rollout for span in spans)}
        return await self._store.append_spans([span for span in spans if seen[span.rollout]])

    async def spans(self, rollout: str, attempt: int | None = None) -> list[Span]:
        """See `Store.spans`."""
        await self._check(rollout)
        return await self._store.spans(rollout, attempt)

    # steps and metrics ------------------------------------------------------------------------------------------
    async def commit_step(self, record: StepRecord) -> None:
        """See `Store.commit_step`."""
        await self._check_run(record.run)
        await self._check(*(rollout for rollout, _ in record.rollouts))
        await self._store.commit_step(record)

    async def steps(
        self, run: str, *, after: int = -1, limit: int | None = None, brief: bool = False
    ) -> list[StepRecord]:
        """See `Store.steps`."""
        seen = await self._sees_run(run)
        return await self._store.steps(run, after=after, limit=limit, brief=brief) if seen else []

    async def last_step(self, run: str) -> StepRecord | None:
        """See `Store.last_step`."""
        return await self._store.last_step(run) if await self._sees_run(run) else None

    async def log_metrics(self, run: str, step: int, values: Mapping[str, float], *, once: str = "") -> None:
        """See `Store.log_metrics`. Raises `StoreError` for a run that is not there."""
        await self._check_run(run)
        await self._store.log_metrics(run, step, values, once=once)

    async def metrics(self, run: str) -> list[MetricPoint]:
        """See `Store.metrics`."""
        return await self._store.metrics(run) if await self._sees_run(run) else []

    # small state ------------------------------------------------------------------------------------------------
    async def put_state(self, run: str, key: str, value: Json, *, once: str | None = "") -> None:
        """See `Store.put_state`. Raises `StoreError` for a run that is not there and for a secret."""
        await self._check_state(run, key)
        await self._store.put_state(run, key, value, once=once)

    async def keep_state(self, run: str, key: str, value: Json) -> Json:
        """See `Store.keep_state`. Raises as `put_state` does."""
        await self._check_state(run, key)
        return await self._store.keep_state(run, key, value)

    async def get_state(self, run: str, key: str) -> Json:
        """See `Store.get_state`. A secret is not there."""
        if is_secret(key) or not await self._sees_run(run):
            return None
        return await self._store.get_state(run, key)

    async def _check_state(self, run: str, key: str) -> None:
        await self._check_run(run)
        check_id(key, "key of the state")
        if is_secret(key):
            raise StoreError(f"the state {key!r} is a secret of the servers: use a key without the word secret")

    # tokens -----------------------------------------------------------------------------------------------------
    async def put_token(self, token: Token, *, once: str = "") -> Token:
        """See `Store.put_token`. Raises `DataError` for a token of another project."""
        if self._project not in (None, token.project):
            raise DataError(f"a token of project {self._project!r} makes no tokens for {token.project!r}")
        return await self._store.put_token(token, once=once)

    async def get_token(self, token: str) -> Token | None:
        """See `Store.get_token`."""
        found = await self._store.get_token(token)
        return found if found is None or self._project in (None, found.project) else None

    async def list_tokens(self) -> list[Token]:
        """See `Store.list_tokens`."""
        return [token for token in await self._store.list_tokens() if self._project in (None, token.project)]

    async def revoke_token(self, token: str) -> Token:
        """See `Store.revoke_token`."""
        if await self.get_token(token) is None:
            raise StoreError(f"there is no token {token!r}: list_tokens() says which there are")
        return await self._store.revoke_token(token)

    # resources --------------------------------------------------------------------------------------------------
    async def put_resource(self, resource: Resource) -> Resource:
        """See `Store.put_resource`. Raises `DataError` for a name that is reserved."""
        stored = await self._store.put_resource(replace(resource, name=self._names.resource_in(resource.name)))
        return self._names.resource_out(stored)

    async def get_resource(self, name: str, which: int | str = LATEST) -> Resource | None:
        """See `Store.get_resource`."""
        if not self._names.may_have(name):
            return None
        found = await self._store.get_resource(self._names.resource_in(name), which)
        return None if found is None else self._names.resource_out(found)

    async def list_resources(self, name: str | None = None) -> list[Resource]:
        """See `Store.list_resources`."""
        if name is not None:
            named = self._names.may_have(name)
            found = await self._store.list_resources(self._names.resource_in(name)) if named else []
        else:
            found = [item for item in await self._store.list_resources() if self._names.owns(item.name)]
        return [self._names.resource_out(resource) for resource in found]

    async def set_alias(self, name: str, alias: str, version: int, *, once: str = "") -> Alias:
        """See `Store.set_alias`."""
        await self._check_version(name, version)
        moved = await self._store.set_alias(self._names.resource_in(name), alias, version, once=once)
        return self._names.alias_out(moved)

    async def roll_back_alias(self, name: str, alias: str, *, once: str = "") -> Alias:
        """See `Store.roll_back_alias`."""
        if not await self.alias_history(name, alias):
            raise StoreError(f"the resource {name!r} has no alias {alias!r}: list_aliases() says which there are")
        moved = await self._store.roll_back_alias(self._names.resource_in(name), alias, once=once)
        return self._names.alias_out(moved)

    async def list_aliases(self, name: str | None = None) -> list[Alias]:
        """See `Store.list_aliases`."""
        if name is not None:
            named = self._names.may_have(name)
            found = await self._store.list_aliases(self._names.resource_in(name)) if named else []
        else:
            found = [alias for alias in await self._store.list_aliases() if self._names.owns(alias.name)]
        return [self._names.alias_out(alias) for alias in found]

    async def alias_history(self, name: str, alias: str) -> list[Alias]:
        """See `Store.alias_history`."""
        if not self._names.may_have(name):
            return []
        moves = await self._store.alias_history(self._names.resource_in(name), alias)
        return [self._names.alias_out(move) for move in moves]

    async def resource_uses(self, name: str) -> list[ResourceUse]:
        """See `Store.resource_uses`: by runs of this project."""
        if not self._names.may_have(name):
            return []
        uses = await self._store.resource_uses(self._names.resource_in(name))
        return [use for use in uses if await self._sees_run(use.run)]

    async def _check_version(self, name: str, version: int) -> None:
        if await self.get_resource(name, version) is None:
            known = ", ".join(str(resource.version) for resource in await self.list_resources(name)) or "none"
            raise StoreError(f"there is no version {version} of the resource {name!r}; there are: {known}")
