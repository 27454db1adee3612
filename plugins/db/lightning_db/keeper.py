"""The operations on a database as a whole (`Keeper`), and the keeper for a store's URL.

The invariant: looking at a database never changes it, and never creates one.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, cast

from lightning.errors import ConfigError, StoreError, UnavailableError
from lightning.plugins import plugins
from lightning.store.protocol import Store
from lightning.store.url import parse, redacted

SERVERS: Final = ("http", "https")
"""The schemes of stores behind a server, which have no keeper."""


@dataclass(frozen=True, slots=True)
class DatabaseStatus:
    """The content of a database in numbers. Times are Unix seconds. None means that there is nothing, or that this kind of
    store does not know.

    `schema` is the version of its schema. `rollouts` are counted by status, `tokens` (of the control API) by `active`,
    `expired` and `revoked`. `oldest` is when the first run was created, `newest` when an attempt last began or ended.
    """

    store: str
    schema: int | None
    bytes: int | None
    runs: int
    rollouts: Mapping[str, int]
    calls: int | None
    spans: int | None
    steps: int
    resources: int
    tokens: Mapping[str, int] | None
    oldest: float | None
    newest: float | None


@dataclass(frozen=True, slots=True)
class Weight:
    """How much data of some rollouts is stored: model calls, spans, and the bytes of tokens and extras."""

    calls: int = 0
    spans: int = 0
    bytes: int = 0

    def __add__(self, other: Weight) -> Weight:
        return Weight(self.calls + other.calls, self.spans + other.spans, self.bytes + other.bytes)


class Keeper(Protocol):
    """Looks after one database. Every method raises `StoreError` (or a subclass) when the database refuses."""

    async def status(self) -> DatabaseStatus:
        """Return the database's content in numbers, from one snapshot."""

    async def backup(self, target: Path) -> None:
        """Write one snapshot of the database into the new SQLite file `target`, while other processes may go on writing.

        Raises `StoreError` if the file exists. A backup that is interrupted leaves no file.
        """

    async def restore(self, source: Path) -> None:
        """Fill this database, which must be new or empty, from a backup, or from any SQLite store."""

    async def activity(self) -> dict[str, float]:
        """Return when an attempt of each run last began or ended, in Unix seconds, without the runs that have no attempt."""

    async def busy_runs(self) -> frozenset[str]:
        """Return the runs in which a worker holds a valid lease now."""

    async def branched_runs(self) -> frozenset[str]:
        """Return the runs with rollouts that are branches, whatever run their parents are in."""

    async def weigh(self, run: str, groups: Sequence[str]) -> list[Weight]:
        """Return how much data of each of these groups of a run is stored."""

    async def forget_calls(self, run: str, groups: Sequence[str]) -> None:
        """Remove the calls, spans, tool events and labels of groups. Rollouts and their rewards stay, also those of steps.

        Only whole groups are possible, because the calls of a group are stored as differences to one another. A group with a
        rollout that has not ended stays as it is.
        """

    async def forget_run(self, run: str) -> None:
        """Remove a run with all of its data. Raises `StoreError` if a worker holds a lease in it."""

    async def vacuum(self) -> str:
        """Remove expired data: gateways' traces whose keys have expired or whose rollouts are gone, seats that no gateway can
        take any more, and expired answers. Then give free space back to the file system, if the database does not do so by
        itself and nobody has to wait for it. Return why the space was not given back; empty if it was."""


async def look(store: Store, url: str) -> DatabaseStatus:
    """Return the status of a store without a keeper, as far as a store's own operations tell it. Raises `StoreError`."""
    rollouts: Counter[str] = Counter()
    steps = 0
    runs = await store.list_runs(brief=True)
    for run in runs:
        for counted in await store.count_rollouts(run.id):
            rollouts[counted.status.value] += counted.rollouts
        steps += len(await store.steps(run.id, brief=True))
    return DatabaseStatus(
        store=redacted(url),
        schema=None,
        bytes=None,
        runs=len(runs),
        rollouts=dict(rollouts),
        calls=None,
        spans=None,
        steps=steps,
        resources=await _resources(store),
        tokens=await _tokens(store),
        oldest=min((run.created_at for run in runs), default=None),
        newest=None,
    )


async def _resources(store: Store) -> int:
    """Return how many versions of resources a store has; 0 without the plugin for resources."""
    brought = {operation.name: operation for operation in plugins().operations()}
    return len(await brought["list_resources"](store)) if "list_resources" in brought else 0


async def _tokens(store: Store) -> dict[str, int] | None:
    """Count a store's tokens by their state; None if the caller may not see tokens, or without the plugin for tokens."""
    brought = {operation.name: operation for operation in plugins().operations()}
    if "list_tokens" not in brought:
        return None
    try:
        found = await brought["list_tokens"](store)
    except UnavailableError:
        raise
    except StoreError:
        return None
    return count_tokens([(token.expires_at, token.revoked_at) for token in found], time.time())


def count_tokens(tokens: Sequence[tuple[float | None, float | None]], now: float) -> dict[str, int]:
    """Count tokens, given as `(expires_at, revoked_at)` in Unix seconds or None, by their state at the time `now`."""
    found = {"active": 0, "expired": 0, "revoked": 0}
    for expires_at, revoked_at in tokens:
        expired = expires_at is not None and expires_at <= now
        found["revoked" if revoked_at is not None else "expired" if expired else "active"] += 1
    return found


def keeper_of(url: str) -> Keeper:
    """Return the keeper of the database at a store's URL. Raises `ConfigError` for a store without a database of its own."""
    scheme = parse(url).scheme
    if scheme in plugins().names("keepers"):
        return cast("Callable[[str], Keeper]", plugins().get("keepers", scheme))(url)
    if scheme in SERVERS:
        raise ConfigError(
            f"{redacted(url)} is a server, not a database: give this command the URL of the database that the server was "
            "started with"
        )
    if scheme not in plugins().names("stores"):
        plugins().get("stores", scheme)  # raises: no such store, or a plugin that is broken or switched off
    raise ConfigError(f"a {scheme} store keeps nothing that this command could look after: give a database's URL")
