"""Resources in SQL databases.

The invariant: it keeps what `lightning_resources.operations` promises. A move of an alias is one row, so that a reader sees
either the old version or the new one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final, cast

from lightning.errors import ConflictError, StoreError
from lightning.store import rollout_state, rows
from lightning.store.relational.transaction import SqlPart, Transaction, done_once
from lightning.types import Json

from lightning_resources.nouns import LATEST, Alias, Resource, ResourceUse, check_alias, no_version, uses_of_versions

TABLES: Final = (
    """CREATE TABLE resources (
        n INTEGER PRIMARY KEY,
        name TEXT NOT NULL,
        version INTEGER NOT NULL,
        kind TEXT NOT NULL,
        digest TEXT NOT NULL,
        content TEXT NOT NULL,
        metadata TEXT NOT NULL,
        created_at REAL NOT NULL,
        UNIQUE (name, version),
        UNIQUE (name, digest)
    )""",
    # A row for each move; `earlier` is the `n` of the move to roll back to.
    """CREATE TABLE resources_aliases (
        n INTEGER PRIMARY KEY,
        name TEXT NOT NULL,
        alias TEXT NOT NULL,
        version INTEGER NOT NULL,
        at REAL NOT NULL,
        earlier INTEGER
    )""",
    "CREATE INDEX resources_aliases_by_name ON resources_aliases (name, alias, n)",
)
COLUMNS: Final = rows.Columns(Resource, "resource {_.name!r}", forms={"content": rows.Form(rows.dump, rows.load)})
RESOURCE_COLUMNS: Final = f"{COLUMNS.names()}, digest"
_PLACES: Final = ", ".join("?" for _ in RESOURCE_COLUMNS.split(", "))
INSERT_RESOURCE: Final = f"INSERT INTO resources ({RESOURCE_COLUMNS}) VALUES ({_PLACES})"  # noqa: S608
SELECT_SAME_RESOURCE: Final = f"SELECT {RESOURCE_COLUMNS} FROM resources WHERE name = ? AND digest = ?"  # noqa: S608
SELECT_RESOURCE: Final = f"SELECT {RESOURCE_COLUMNS} FROM resources WHERE name = ? AND version = ?"  # noqa: S608
SELECT_LATEST: Final = f"SELECT {RESOURCE_COLUMNS} FROM resources WHERE name = ? ORDER BY version DESC LIMIT 1"  # noqa: S608
SELECT_RESOURCES: Final = f"SELECT {RESOURCE_COLUMNS} FROM resources ORDER BY name, version"  # noqa: S608
SELECT_VERSIONS: Final = f"SELECT {RESOURCE_COLUMNS} FROM resources WHERE name = ? ORDER BY version"  # noqa: S608
ALIAS_COLUMNS: Final = "name, alias, version, at"
INSERT_ALIAS: Final = f"INSERT INTO resources_aliases ({ALIAS_COLUMNS}, earlier) VALUES (?, ?, ?, ?, ?)"  # noqa: S608
SELECT_ALIAS: Final = (
    f"SELECT n, earlier, {ALIAS_COLUMNS} FROM resources_aliases WHERE name = ? AND alias = ? ORDER BY n DESC LIMIT 1"  # noqa: S608
)
SELECT_MOVE: Final = f"SELECT n, earlier, {ALIAS_COLUMNS} FROM resources_aliases WHERE n = ?"  # noqa: S608
SELECT_MOVES: Final = f"SELECT {ALIAS_COLUMNS} FROM resources_aliases WHERE name = ? AND alias = ? ORDER BY n"  # noqa: S608
SELECT_ALIASES: Final = (
    f"SELECT {ALIAS_COLUMNS} FROM resources_aliases WHERE n IN (SELECT max(n) FROM resources_aliases GROUP BY name, alias) "  # noqa: S608
    "UNION ALL SELECT name, 'latest', version, created_at FROM resources r "
    "WHERE version = (SELECT max(version) FROM resources s WHERE s.name = r.name) ORDER BY 1, 2"
)
SELECT_USES: Final = (
    "SELECT run, split, resources, count(*), count(reward), sum(CASE WHEN status = 'failed' THEN 1 ELSE 0 END), "
    "sum(reward) FROM rollouts WHERE resources <> '{}' GROUP BY run, split, resources ORDER BY min(n)"
)
"""Returns one row for each set of versions that rollouts ran with; there are few, however many rollouts there are."""


async def put(transaction: Transaction, resource: Resource) -> Resource:
    """Store a resource as the next version of its name, unless a version has its content."""
    await transaction.alone(f"resource {resource.name}")
    same = await transaction.one(SELECT_SAME_RESOURCE, (resource.name, resource.digest))
    newest = await get(transaction, resource.name, LATEST)
    if newest is not None and newest.kind is not resource.kind:
        raise ConflictError(
            f"the resource {resource.name!r} is a {newest.kind.value}, not a {resource.kind.value}: give it another name"
        )
    if same is not None:
        return read(same)
    version = 1 if newest is None else newest.version + 1
    created = replace(resource, version=version, created_at=await transaction.now())
    await transaction.insert(INSERT_RESOURCE, (*COLUMNS.values(created), resource.digest))
    stored = await get(transaction, resource.name, version)
    assert stored is not None, "the version was inserted in this transaction"
    return stored


async def get(transaction: Transaction, name: str, which: int | str) -> Resource | None:
    """Return a version by its number or by an alias; None when there is none."""
    if which == LATEST:
        row = await transaction.one(SELECT_LATEST, (name,))
    else:
        version = which if isinstance(which, int) else await _target(transaction, name, which)
        row = None if version is None else await transaction.one(SELECT_RESOURCE, (name, version))
    return None if row is None else read(row)


async def versions(transaction: Transaction, name: str | None) -> list[Resource]:
    """Return all versions of a resource (None: of all resources), by name and version."""
    found = await transaction.all(SELECT_RESOURCES) if name is None else await transaction.all(SELECT_VERSIONS, (name,))
    return [read(row) for row in found]


async def set_alias(transaction: Transaction, name: str, alias: str, version: int, once: str) -> Alias:
    """Point an alias to a version; nothing changes when it points there already."""
    check_alias(alias)
    known_as = rollout_state.known_as(once, "set_alias", name, alias, version)
    return await _once(transaction, known_as, name, alias, lambda: _set_alias(transaction, name, alias, version))


async def _set_alias(transaction: Transaction, name: str, alias: str, version: int) -> Alias:
    await transaction.alone(f"resource {name}")
    if await get(transaction, name, version) is None:
        raise no_version(version, name, await versions(transaction, name))
    current = await transaction.one(SELECT_ALIAS, (name, alias))
    if current is not None and current[4] == version:
        return Alias(*current[2:])
    return await _move(transaction, name, alias, version, None if current is None else current[0])


async def roll_back(transaction: Transaction, name: str, alias: str, once: str) -> Alias:
    """Point an alias back to its previous version."""
    known_as = rollout_state.known_as(once, "roll_back_alias", name, alias)
    return await _once(transaction, known_as, name, alias, lambda: _roll_back(transaction, name, alias))


async def _roll_back(transaction: Transaction, name: str, alias: str) -> Alias:
    """Roll an alias back. The new move gets the `earlier` of the move it returns to, so that a repeated rollback goes further
    back."""
    await transaction.alone(f"resource {name}")
    current = await transaction.one(SELECT_ALIAS, (name, alias))
    if current is None:
        raise StoreError(
            f"the resource {name!r} has no alias {alias!r}: `lightning resources ls` shows those there are"
        )
    earlier = None if current[1] is None else await transaction.one(SELECT_MOVE, (current[1],))
    if earlier is None:
        raise StoreError(f"{name}@{alias} has always been version {current[4]}: there is nothing to return to")
    return await _move(transaction, name, alias, earlier[4], earlier[1])


async def aliases(transaction: Transaction, name: str | None) -> list[Alias]:
    """Return where the aliases of a resource (None: of all) point now, with `latest`."""
    found = [Alias(*row) for row in await transaction.all(SELECT_ALIASES)]
    return [alias for alias in found if name is None or alias.name == name]


async def history(transaction: Transaction, name: str, alias: str) -> list[Alias]:
    """Return every move of an alias, oldest first."""
    return [Alias(*row) for row in await transaction.all(SELECT_MOVES, (name, alias))]


async def uses(transaction: Transaction, name: str) -> list[ResourceUse]:
    """Return the results of rollouts under each version of a resource."""
    return uses_of_versions(name, await transaction.all(SELECT_USES))


async def _move(transaction: Transaction, name: str, alias: str, version: int, earlier: int | None) -> Alias:
    await transaction.insert(INSERT_ALIAS, (name, alias, version, await transaction.now(), earlier))
    return Alias(name, alias, version, await transaction.now())


async def _once(
    transaction: Transaction, known_as: str, name: str, alias: str, move: Callable[[], Awaitable[Alias]]
) -> Alias:
    """Move an alias once for calls with the same id `known_as`, and return where it then points."""

    async def work() -> Json:
        moved = await move()
        return [moved.version, moved.at]

    version, at = cast("tuple[int, float]", await done_once(transaction, known_as, "", work))
    return Alias(name, alias, version, at)


async def _target(transaction: Transaction, name: str, alias: str) -> int | None:
    row = await transaction.one(SELECT_ALIAS, (name, alias))
    return None if row is None else int(row[4])


def read(row: rows.Row) -> Resource:
    """Read a resource from a row of `RESOURCE_COLUMNS`. Raises `StoreError` when its content does not match its digest."""
    *kept, digest = row
    resource = COLUMNS.read(kept)
    if resource.digest != digest:
        raise StoreError(
            f"version {resource.version} of resource {resource.name!r} is corrupt in the database: its content has changed. "
            "Restore the database from a backup"
        )
    return resource


PART: Final = SqlPart(
    reads={
        "get_resource": get,
        "list_resources": versions,
        "list_aliases": aliases,
        "alias_history": history,
        "resource_uses": uses,
    },
    writes={"put_resource": put, "set_alias": set_alias, "roll_back_alias": roll_back},
    tables=(TABLES,),
)
