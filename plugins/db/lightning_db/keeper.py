"""What can be done with a database as a whole, whichever it is, and who does it for a URL.

The invariant: looking at a database never changes it, nor makes one.
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
"""Stores that are looked at through their own answers alone."""


@dataclass(frozen=True, slots=True)
class DatabaseStatus:
    """What is in a database. Times are Unix seconds; None where there is nothing, or where this store cannot tell.

    `schema` is the version of what it keeps. `rollouts` are counted by status, `tokens` (of the control API) by `active`,
    `expired` and `revoked`. `oldest` is when the first run began, `newest` when an attempt last began or ended.
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
    """How much is kept of some rollouts: model calls, spans, and bytes of their tokens as they are stored."""

    calls: int = 0
    spans: int = 0
    bytes: int = 0

    def __add__(self, other: Weight) -> Weight:
        return Weight(self.calls + other.calls, self.spans + other.spans, self.bytes + other.bytes)


class Keeper(Protocol):
    """Looks after one database. Every method raises `StoreError` (or a subclass) when the database refuses."""

    async def status(self) -> DatabaseStatus:
        """What is in it, read at one moment."""

    async def backup(self, target: Path) -> None:
        """Write all of it, as it is at one moment, into the new SQLite file `target`, while others may go on writing.

        Raises `StoreError` when there is a file already; a backup that was broken off leaves none.
        """

    async def restore(self, source: Path) -> None:
        """Fill this database, which must be new or empty, from a backup, or from any SQLite store."""

    async def activity(self) -> dict[str, float]:
        """When an attempt of each run last began or ended, Unix seconds; a run without one is absent."""

    async def busy_runs(self) -> frozenset[str]:
        """Runs with an attempt that somebody holds a lease on at this moment."""

    async def weigh(self, run: str, groups: Sequence[str]) -> list[Weight]:
        """How much is kept of each of these groups of a run."""

    async def forget_calls(self, run: str, groups: Sequence[str]) -> None:
        """Remove calls, spans, tool events, step rewards and labels of whole groups; rollouts and their rewards stay.

        Groups, because the calls of siblings are stored as differences to one another. One of which a rollout has not ended
        is left as it is.
        """

    async def forget_run(self, run: str) -> None:
        """Remove a run with everything that is its own. Raises `StoreError` while somebody works on it."""

    async def vacuum(self) -> str:
        """Remove what gateways keep of traces whose keys have expired and of runs that are gone, seats that no gateway can have
        any more, and answers that nobody asks for again; and give the space of what was removed back to the file system, where
        the database does not do so by itself and nobody has to wait for it. Returns why it was not given back, or nothing."""


async def look(store: Store, url: str) -> DatabaseStatus:
    """The status of a store that has no keeper: what can be asked of any. Raises `StoreError` when it refuses."""
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
    """How many versions there are; 0 where no plugin keeps any."""
    brought = {operation.name: operation for operation in plugins().operations()}
    return len(await brought["list_resources"](store)) if "list_resources" in brought else 0


async def _tokens(store: Store) -> dict[str, int] | None:
    """None where whoever asks may not see tokens, or no plugin keeps any."""
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
    """How many of `(expires_at, revoked_at)` are active, expired and revoked."""
    found = {"active": 0, "expired": 0, "revoked": 0}
    for expires_at, revoked_at in tokens:
        expired = expires_at is not None and expires_at <= now
        found["revoked" if revoked_at is not None else "expired" if expired else "active"] += 1
    return found


def keeper_of(url: str) -> Keeper:
    """The keeper of the database behind a store's URL. Raises `ConfigError` for a store that has no database of its own."""
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
