"""The store as one project sees it. This module alone keeps projects apart.

The invariant: every method answers about another project's things exactly as about things that were never created. No token
reads a secret in a run's state, or what servers keep there for one another. Only a *new* id can be found to be taken by another
project, since the ids of runs and rollouts are one name space.

Resources and workers have no project in the store, so their stored names contain it (`Names`): two projects can use one name
for different things. A project's ids are remembered for a minute, so that they need not be looked up at each request.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from lightning.bounded import Aging, Bounded
from lightning.errors import ConflictError, DataError
from lightning.store.operation import Operation, Operations, UnseenError
from lightning.store.protocol import Page, RunWatch, Store
from lightning.store.rollout_state import unknown_rollout
from lightning.types import DEFAULT_PROJECT, Lease, Rollout, Run, Span, StepRecord, Transition
from lightning_resources.names import ProjectNames

from lightning_server.operations import over_http

VIEWS = 1024
REMEMBERED = 16_384
"""At most this many ids of a project are remembered; older ones are looked up again."""
FORGET_AFTER = 60.0
"""Seconds until an id is looked up again."""
NAMES = frozenset({"run", "rollout", "worker", "key"})
"""Arguments of operations that are ids or names to be checked."""
WHOLE_STORE = ""
"""The `run` of state that belongs to no run."""


def is_secret(key: str) -> bool:
    """Whether a key of a run's state holds a secret, such as `gateway_secret`, which no token may read or change."""
    return "secret" in key.lower()


class Projects:
    """The views of one store, kept because each remembers the ids that it has looked up."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._views = Bounded[str | None, ProjectStore](VIEWS)

    def of(self, project: str | None) -> ProjectStore:
        """Return the view of a project; None: of all projects, also without secrets."""
        view = self._views.used(project)
        return self._views.keep(project, ProjectStore(self._store, project)) if view is None else view


class ProjectStore(Operations):
    """A view of one project on a store of many projects (`project=None`: of all). The store's owner opens and closes the store.

    The arguments of an operation say what it touches: runs and rollouts must be the project's, names of workers are changed to
    those of the project; an operation may have its own rule instead (`Operation.owned`). Otherwise it is refused, or answered
    as if nothing existed, as its line in the table says.
    """

    def __init__(self, store: Store, project: str | None) -> None:
        self._store = store
        self.project = project
        """The project of the view; None: all."""
        self._names = Names(project)
        self._known = Aging[tuple[str, str], bool](REMEMBERED)

    async def open(self, *, make: bool = True) -> None:
        """Do nothing: the store's owner opens it."""

    async def close(self) -> None:
        """Do nothing: other views use the same store."""

    async def call(self, operation: Operation, arguments: dict[str, Any]) -> Any:
        """Do an operation on what the project sees. Raises `UnseenError` for other things, unless the operation is answered as
        if nothing existed."""
        try:
            if operation.owned is not None:
                if self.project is None:
                    return await operation.on(self._store)(**arguments)
                return await operation.owned(self._store, self.project, operation, arguments)
            for kind, identity in dict.fromkeys(_touched(arguments)):
                await self._check(kind, identity)
        except UnseenError:
            if (told := over_http(operation)).empty:
                return told.nothing()
            raise
        inward = {name: self._in(name, value) for name, value in arguments.items()}
        return await self._out(await operation.on(self._store)(**inward))

    # what is seen -----------------------------------------------------------------------------------------------
    async def _check(self, kind: str, identity: str) -> None:
        """Raise `UnseenError` for a run, rollout or key that the project does not see; `DataError` for an invalid name and for
        another project."""
        if kind == "run" and not await self._sees(kind, identity):
            raise UnseenError(f"run {identity!r} is unknown: create it with put_run() first")
        if kind == "rollout" and not await self._sees(kind, identity):
            raise UnseenError(str(unknown_rollout(identity)))
        if kind == "project" and self.project not in (None, identity):
            raise DataError(f"a token of project {self.project!r} makes nothing for {identity!r}")
        if kind == "worker":
            check_id(identity, "worker")
        if kind == "key":
            if is_secret(identity):
                raise UnseenError(
                    f"the state {identity!r} is a secret of the servers: use a key without the word secret"
                )
            check_id(identity, "key of the state")

    def _know(self, kind: str, identities: Iterable[str]) -> None:
        """Remember ids that belong to the project."""
        now = time.monotonic()
        for identity in identities:
            self._known.keep((kind, identity), (True, now))

    async def _sees(self, kind: str, identity: str) -> bool:
        """Whether a run or a rollout belongs to the project; with all projects, whether it is no place of the servers."""
        if kind == "run" and is_of_servers(identity):
            return False
        if self.project is None or self._known.fresh((kind, identity), time.monotonic(), FORGET_AFTER):
            return True
        if kind == "run":
            run = await self._store.get_run(identity) if identity != WHOLE_STORE else None
            seen = run is not None and run.project == self.project
        else:
            rollout = await self._store.get_rollout(identity)
            seen = rollout is not None and await self._sees("run", rollout.run)
        if seen:
            self._know(kind, [identity])
        return seen

    # names on the way in and out --------------------------------------------------------------------------------
    def _in(self, name: str, value: Any) -> Any:
        """Return an argument with the names that the store has. Raises `DataError` for a reserved name."""
        match value:
            case Lease():
                return self._names.lease_in(value)
            case str() if name == "worker":
                return self._names.worker_in(value)
        return value

    async def _out(self, value: Any) -> Any:
        """Return an answer with the names that the project sees; runs of other projects are left out of lists."""
        match value:
            case list():
                return [await self._out(item) for item in value if self._owns(item)]
            case Page():
                if self.project is not None:
                    self._know("rollout", [rollout.id for rollout in value.items])
                return replace(value, items=tuple(map(self._names.rollout_out, value.items)))
            case Rollout():
                return self._names.rollout_out(value)
            case Lease():
                return self._names.lease_out(value)
        return value

    def _owns(self, item: object) -> bool:
        return not isinstance(item, Run) or self.project in (None, item.project)

    # what has rules of its own ----------------------------------------------------------------------------------
    async def put_run(self, run: Run) -> Run:
        """Create a run in this project, or get the one with its id. A run of the default project becomes one of this project.
        Raises `DataError` for a run of another project, `ConflictError` when another project has the id."""
        check_run_id(run.id)
        if self.project is None:
            return await self._store.put_run(run)
        if run.project not in (DEFAULT_PROJECT, self.project):
            raise DataError(f"run {run.id!r} is of project {run.project!r}, and the token of {self.project!r}")
        stored = await self._store.put_run(replace(run, project=self.project))
        if stored.project != self.project:
            raise ConflictError(f"the id {run.id!r} of a run is taken: choose another one")
        return stored

    async def list_runs(
        self, project: str | None = None, *, after: str = "", limit: int | None = None, brief: bool = False
    ) -> list[Run]:
        """Return the project's runs, newest first; none where `project` names another one."""
        if self.project is not None and project not in (None, self.project):
            return []
        seen = project if self.project is None else self.project
        return await self._store.list_runs(seen, after=after, limit=limit, brief=brief)

    @asynccontextmanager
    async def watch(self, run: str) -> AsyncIterator[RunWatch]:
        """Watch a run for changes. Raises `StoreError` on entering for a run that the project does not see."""
        await self._check("run", run)
        async with self._store.watch(run) as watch:
            yield watch

    async def create_rollouts(self, rollouts: Sequence[Rollout]) -> int:
        """Create rollouts, and return how many are new. Raises `StoreError` for a run or a parent that the project does not
        see, `ConflictError` when another run has one of the ids."""
        for run in dict.fromkeys(rollout.run for rollout in rollouts):
            await self._check("run", run)
        for rollout in rollouts:
            check_id(rollout.id, "rollout")
            if rollout.parent is not None:  # a branch is answered from its record
                await self._check("rollout", rollout.parent[0])
        try:
            return await self._store.create_rollouts([self._names.rollout_in(rollout) for rollout in rollouts])
        except ConflictError as error:
            raise ConflictError(
                "no rollout was created: another run has one with an id of these. Begin the ids of rollouts with the id "
                "of their run"
            ) from error


def _touched(arguments: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the kind and the id of each thing that the arguments of an operation name."""
    for name, value in arguments.items():
        if name in NAMES and isinstance(value, str):
            yield name, value
        elif name == "attempts":
            yield from (("rollout", rollout) for rollout, _ in value)
        else:
            for item in value if isinstance(value, list | tuple) else (value,):
                yield from _named_by(item)


def _named_by(noun: object) -> Iterator[tuple[str, str]]:
    match noun:
        case Run():
            yield "project", noun.project
        case Lease():
            yield "rollout", noun.rollout.id
        case StepRecord():
            yield "run", noun.run
            yield from (("rollout", rollout) for rollout, _ in noun.rollouts)
        case Rollout():
            yield "run", noun.run
        case Transition() | Span():
            yield "rollout", noun.rollout


LONGEST_ID = 512
SERVERS = ("gateway/", "policy/")
"""Prefixes of the names under which servers keep in the store's state what they tell one another; no run may have such an
id."""


def check_id(identity: str, what: str) -> None:
    """Raise `DataError` for an invalid name: empty, longer than `LONGEST_ID`, or with control characters."""
    if not 0 < len(identity) <= LONGEST_ID or not identity.isprintable():
        raise DataError(
            f"{identity[:80]!r} cannot name a {what}: use 1 to {LONGEST_ID} printable characters; lightning.types.new_id() "
            "makes a name"
        )


def is_of_servers(run: str) -> bool:
    """Whether the name is a place of the servers, whose state no client reads or writes."""
    return run.startswith(SERVERS)


def check_run_id(identity: str) -> None:
    """Raise `DataError` for an invalid id of a run: no valid name, or one that begins like a place of the servers."""
    check_id(identity, "run")
    if is_of_servers(identity):
        raise DataError(
            f"{identity[:80]!r} cannot name a run: {' and '.join(map(repr, SERVERS))} begin places of the servers; choose "
            "another id"
        )


class Names:
    """Translates names between one project and the store; with None (all projects) names stay as they are stored."""

    def __init__(self, project: str | None) -> None:
        self._resources = None if project is None else ProjectNames(project)
        self._worker = "" if project is None else f"{project}::"

    def rollout_in(self, rollout: Rollout) -> Rollout:
        """Return a rollout with the stored names of its resources. Raises `DataError` for a reserved name."""
        if self._resources is None or not rollout.resources:
            return rollout
        return replace(rollout, resources={self._resources.stored(name): n for name, n in rollout.resources.items()})

    def rollout_out(self, stored: Rollout) -> Rollout:
        """Return a stored rollout with the project's names of its resources."""
        if self._resources is None or not stored.resources:
            return stored
        return replace(stored, resources={self._resources.seen(name): n for name, n in stored.resources.items()})

    def worker_in(self, worker: str) -> str:
        """Return the name under which a worker's leases are stored. An empty name stays empty, and the store refuses it."""
        return self._worker + worker if worker else worker

    def lease_in(self, lease: Lease) -> Lease:
        """Return a lease with the names that the store has."""
        return replace(lease, rollout=self.rollout_in(lease.rollout), worker=self.worker_in(lease.worker))

    def lease_out(self, stored: Lease) -> Lease:
        """Return a stored lease with the project's names."""
        worker = stored.worker.removeprefix(self._worker)
        return replace(stored, rollout=self.rollout_out(stored.rollout), worker=worker)
