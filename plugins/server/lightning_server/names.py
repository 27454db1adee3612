"""How a project's names lie in the store: resources and workers have no project of their own, so their names say it.

The invariant: two projects can use one name and never mean the same thing; what goes in comes out as it was. The default
project's resources keep their bare names, because runs that know nothing of projects made them. Which ids of runs and
rollouts are a project's is remembered for a minute, so that it need not be looked up each time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

from lightning.bounded import Bounded
from lightning.errors import DataError
from lightning.store.protocol import Alias
from lightning.types import DEFAULT_PROJECT, Lease, Resource, Rollout

REMEMBERED = 16_384
"""Ids; beyond, the oldest are looked up again."""
FORGET_AFTER = 60.0
"""Seconds until all are looked up again."""


class KnownIds:
    """Ids known to be of one project; each kind of them is a name space."""

    def __init__(self) -> None:
        self._ids = Bounded[tuple[str, str], None](REMEMBERED)
        self._since = time.monotonic()

    def has(self, kind: str, identity: str) -> bool:
        """Whether this id is known."""
        now = time.monotonic()
        if now - self._since > FORGET_AFTER:
            self._ids.clear()
            self._since = now
        return (kind, identity) in self._ids

    def add(self, kind: str, identities: Iterable[str]) -> None:
        """These are of the project."""
        for identity in identities:
            self._ids.keep((kind, identity), None)


LONGEST_ID = 512
RESERVED = "project::"
"""Begins the stored name of every resource of a project that has a name."""
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
        self._bare = project in (None, DEFAULT_PROJECT)
        self._all = project is None
        self._resource = "" if self._bare else f"{RESERVED}{project}::"
        self._worker = "" if self._all else f"{project}::"

    def may_have(self, name: str) -> bool:
        """Whether a resource can be called so here."""
        return self._all or not name.startswith(RESERVED)

    def owns(self, stored: str) -> bool:
        """Whether the resource stored under this name is one of the project's."""
        return self._all or (not stored.startswith(RESERVED) if self._bare else stored.startswith(self._resource))

    def resource_in(self, name: str) -> str:
        """The name to store. Raises `DataError` for a reserved one."""
        if not self.may_have(name):
            raise DataError(
                f"the resource {name!r} cannot be called so: names that begin with {RESERVED!r} are reserved"
            )
        return self._resource + name

    def resource_out(self, stored: Resource) -> Resource:
        """A resource under the project's own name for it."""
        return replace(stored, name=stored.name.removeprefix(self._resource)) if self._resource else stored

    def alias_out(self, stored: Alias) -> Alias:
        """An alias under the project's own name for its resource."""
        return replace(stored, name=stored.name.removeprefix(self._resource)) if self._resource else stored

    def rollout_in(self, rollout: Rollout) -> Rollout:
        """A rollout as it is stored."""
        if self._all or not rollout.resources:
            return rollout
        return replace(rollout, resources={self.resource_in(name): n for name, n in rollout.resources.items()})

    def rollout_out(self, stored: Rollout) -> Rollout:
        """A rollout as the project sees it."""
        if not self._resource or not stored.resources:
            return stored
        named = {name.removeprefix(self._resource): version for name, version in stored.resources.items()}
        return replace(stored, resources=named)

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
