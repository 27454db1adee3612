"""The store as one project sees it: the one place that keeps projects apart.

The invariant: what belongs to another project answers exactly as what was never created, whichever method is asked; a secret
in a run's state, and what servers keep there for one another, is told to nobody. Only an id that one asks to *create* can be
found to be taken elsewhere, since the ids of runs and rollouts are one name space.

Resources and workers have no project of their own in the store, so their names there say it (`Names`): two projects can use one
name and never mean the same thing. Which ids are a project's is remembered for a minute, so that they need not be looked up
each time.
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
"""Ids that are known to be a project's; beyond, the oldest are looked up again."""
FORGET_AFTER = 60.0
"""Seconds until an id is looked up again."""
NAMES = frozenset({"run", "rollout", "worker", "key"})
"""Arguments that are ids."""
WHOLE_STORE = ""
"""The `run` of state that belongs to no run."""


def is_secret(key: str) -> bool:
    """Whether a key of a run's state holds what no token may read or change, such as `gateway_secret`."""
    return "secret" in key.lower()


class Projects:
    """The views of one store, kept so that each remembers what it has looked up."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._views = Bounded[str | None, ProjectStore](VIEWS)

    def of(self, project: str | None) -> ProjectStore:
        """The store as `project` sees it; None sees all projects, and no secret either."""
        view = self._views.used(project)
        return self._views.keep(project, ProjectStore(self._store, project)) if view is None else view


class ProjectStore(Operations):
    """A `Store` of one project over a store of many; with `project=None` of all. Opening and closing are the owner's affair.

    What an operation touches is told by its arguments: runs and rollouts must be the project's, workers get its names; or an
    operation has a rule of its own. It is refused otherwise, or answered as one on nothing, as its table says.
    """

    def __init__(self, store: Store, project: str | None) -> None:
        self._store = store
        self.project = project
        """The project that is seen; None: all."""
        self._names = Names(project)
        self._known = Aging[tuple[str, str], bool](REMEMBERED)

    async def open(self, *, make: bool = True) -> None:
        """Nothing: the store under it is open as long as its owner wants."""

    async def close(self) -> None:
        """Nothing: others look at the store under it too."""

    async def call(self, operation: Operation, arguments: dict[str, Any]) -> Any:
        """Do an operation on what the project sees."""
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
        """Raise `UnseenError` for what the project does not see, `DataError` for what can be no name."""
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
        """These are of the project."""
        now = time.monotonic()
        for identity in identities:
            self._known.keep((kind, identity), (True, now))

    async def _sees(self, kind: str, identity: str) -> bool:
        """Whether a run or a rollout is of the project."""
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
        """An argument as it is stored. Raises `DataError` for a name that is reserved."""
        match value:
            case Lease():
                return self._names.lease_in(value)
            case str() if name == "worker":
                return self._names.worker_in(value)
        return value

    async def _out(self, value: Any) -> Any:
        """An answer as the project sees it. Of a list what is not the project's is left out."""
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
        """See `Store.put_run`. A run that names no project becomes one of this; raises `DataError` for another's,
        `ConflictError` when another project has the id."""
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
        """See `Store.list_runs`."""
        if self.project is None:
            return await self._store.list_runs(project, after=after, limit=limit, brief=brief)
        if project not in (None, self.project):
            return []
        return await self._store.list_runs(self.project, after=after, limit=limit, brief=brief)

    @asynccontextmanager
    async def watch(self, run: str) -> AsyncIterator[RunWatch]:
        """See `Store.watch`. Entering it raises `StoreError` for a run that is not there."""
        await self._check("run", run)
        async with self._store.watch(run) as watch:
            yield watch

    async def create_rollouts(self, rollouts: Sequence[Rollout]) -> int:
        """See `Store.create_rollouts`. Raises `StoreError` for a run that is not there."""
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
    """What the arguments of an operation name: the kind of each thing, and its id."""
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
"""Begin the places in the store's state where servers keep what they tell one another: no run of anybody is called so."""


def check_id(identity: str, what: str) -> None:
    """Raise `DataError` for what no database and no log should get as a name: nothing, control characters, endless text."""
    if not 0 < len(identity) <= LONGEST_ID or not identity.isprintable():
        raise DataError(
            f"{identity[:80]!r} cannot name a {what}: use 1 to {LONGEST_ID} printable characters; lightning.types.new_id() "
            "makes a name"
        )


def is_of_servers(run: str) -> bool:
    """Whether this names a place of the servers, whose state nobody reads or writes through a server."""
    return run.startswith(SERVERS)


def check_run_id(identity: str) -> None:
    """Raise `DataError` for what cannot name a run: what no name can be, and what begins like a place of the servers."""
    check_id(identity, "run")
    if is_of_servers(identity):
        raise DataError(
            f"{identity[:80]!r} cannot name a run: {' and '.join(map(repr, SERVERS))} begin places of the servers; choose "
            "another id"
        )


class Names:
    """The names of one project; with None, which sees all projects, names are as they are stored."""

    def __init__(self, project: str | None) -> None:
        self._resources = None if project is None else ProjectNames(project)
        self._worker = "" if project is None else f"{project}::"

    def rollout_in(self, rollout: Rollout) -> Rollout:
        """A rollout as it is stored. Raises `DataError` for a reserved name of a resource."""
        if self._resources is None or not rollout.resources:
            return rollout
        return replace(rollout, resources={self._resources.stored(name): n for name, n in rollout.resources.items()})

    def rollout_out(self, stored: Rollout) -> Rollout:
        """A rollout as the project sees it."""
        if self._resources is None or not stored.resources:
            return stored
        return replace(stored, resources={self._resources.seen(name): n for name, n in stored.resources.items()})

    def worker_in(self, worker: str) -> str:
        """The name under which a worker's leases are stored; an empty one stays what it is, an error of the store."""
        return self._worker + worker if worker else worker

    def lease_in(self, lease: Lease) -> Lease:
        """A lease as the store gave it."""
        return replace(lease, rollout=self.rollout_in(lease.rollout), worker=self.worker_in(lease.worker))

    def lease_out(self, stored: Lease) -> Lease:
        """A lease as the project sees it."""
        worker = stored.worker.removeprefix(self._worker)
        return replace(stored, rollout=self.rollout_out(stored.rollout), worker=worker)
