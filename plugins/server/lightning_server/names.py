"""How a project's names lie in the store: resources and workers have no project of their own, so their names say it.

The invariant: two projects can use one name and never mean the same thing; what goes in comes out as it was. Which ids of runs
and rollouts are a project's is remembered for a minute, so that it need not be looked up each time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

from lightning.bounded import Bounded
from lightning.errors import DataError
from lightning.types import Lease, Rollout
from lightning_resources.names import ProjectNames

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
