"""Resources: versions that never change, and aliases that move between them.

The invariant: a version is written once and read back as it was written; an alias points to a version that exists, each of
its moves is kept, and a move is one row, so that a reader sees the old target or the new one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import cast

from lightning.errors import ConflictError, StoreError
from lightning.store import rollout_state, rows, sql
from lightning.store.protocol import LATEST, Alias, ResourceUse
from lightning.store.relational.transaction import Transaction, done_once
from lightning.types import Json, Resource


async def put(transaction: Transaction, resource: Resource) -> Resource:
    """See `Store.put_resource`."""
    await transaction.alone(f"resource {resource.name}")
    same = await transaction.one(sql.SELECT_SAME_RESOURCE, (resource.name, resource.digest))
    newest = await get(transaction, resource.name, LATEST)
    if newest is not None and newest.kind is not resource.kind:
        raise ConflictError(
            f"the resource {resource.name!r} is a {newest.kind.value}, not a {resource.kind.value}: give it another name"
        )
    if same is not None:
        return rows.resource_from_row(same)
    version = 1 if newest is None else newest.version + 1
    created = replace(resource, version=version, created_at=await transaction.now())
    await transaction.insert(sql.INSERT_RESOURCE, (*rows.RESOURCES.values(created), resource.digest))
    stored = await get(transaction, resource.name, version)
    assert stored is not None, "the version was inserted in this transaction"
    return stored


async def get(transaction: Transaction, name: str, which: int | str) -> Resource | None:
    """See `Store.get_resource`."""
    if which == LATEST:
        row = await transaction.one(sql.SELECT_LATEST, (name,))
    else:
        version = which if isinstance(which, int) else await _target(transaction, name, which)
        row = None if version is None else await transaction.one(sql.SELECT_RESOURCE, (name, version))
    return None if row is None else rows.resource_from_row(row)


async def versions(transaction: Transaction, name: str | None) -> list[Resource]:
    """See `Store.list_resources`."""
    found = (
        await transaction.all(sql.SELECT_RESOURCES)
        if name is None
        else await transaction.all(sql.SELECT_VERSIONS, (name,))
    )
    return [rows.resource_from_row(row) for row in found]


async def set_alias(transaction: Transaction, name: str, alias: str, version: int, known_as: str) -> Alias:
    """See `Store.set_alias`; `known_as` is the name of the call (`rollout_state.known_as`)."""
    rollout_state.check_alias(alias)
    return await _once(transaction, known_as, name, alias, lambda: _set_alias(transaction, name, alias, version))


async def _set_alias(transaction: Transaction, name: str, alias: str, version: int) -> Alias:
    await transaction.alone(f"resource {name}")
    if await get(transaction, name, version) is None:
        raise await _unknown(transaction, name, version)
    current = await transaction.one(sql.SELECT_ALIAS, (name, alias))
    if current is not None and current[4] == version:
        return Alias(*current[2:])
    return await _move(transaction, name, alias, version, None if current is None else current[0])


async def roll_back(transaction: Transaction, name: str, alias: str, known_as: str) -> Alias:
    """See `Store.roll_back_alias`; `known_as` is the name of the call (`rollout_state.known_as`)."""
    return await _once(transaction, known_as, name, alias, lambda: _roll_back(transaction, name, alias))


async def _roll_back(transaction: Transaction, name: str, alias: str) -> Alias:
    """The earlier move's own `earlier` is taken over, so that rolling back again goes on."""
    await transaction.alone(f"resource {name}")
    current = await transaction.one(sql.SELECT_ALIAS, (name, alias))
    if current is None:
        raise StoreError(
            f"the resource {name!r} has no alias {alias!r}: `lightning resources ls` shows those there are"
        )
    earlier = None if current[1] is None else await transaction.one(sql.SELECT_MOVE, (current[1],))
    if earlier is None:
        raise StoreError(f"{name}@{alias} has always been version {current[4]}: there is nothing to return to")
    return await _move(transaction, name, alias, earlier[4], earlier[1])


async def aliases(transaction: Transaction, name: str | None) -> list[Alias]:
    """See `Store.list_aliases`."""
    found = [Alias(*row) for row in await transaction.all(sql.SELECT_ALIASES)]
    return [alias for alias in found if name is None or alias.name == name]


async def history(transaction: Transaction, name: str, alias: str) -> list[Alias]:
    """See `Store.alias_history`."""
    return [Alias(*row) for row in await transaction.all(sql.SELECT_MOVES, (name, alias))]


async def uses(transaction: Transaction, name: str) -> list[ResourceUse]:
    """See `Store.resource_uses`."""
    return rollout_state.uses_of_versions(name, await transaction.all(sql.SELECT_USES))


async def _move(transaction: Transaction, name: str, alias: str, version: int, earlier: int | None) -> Alias:
    await transaction.insert(sql.INSERT_ALIAS, (name, alias, version, await transaction.now(), earlier))
    return Alias(name, alias, version, await transaction.now())


async def _once(
    transaction: Transaction, known_as: str, name: str, alias: str, move: Callable[[], Awaitable[Alias]]
) -> Alias:
    """Where the alias was moved to by the call of this name, which moves it once."""

    async def work() -> Json:
        moved = await move()
        return [moved.version, moved.at]

    version, at = cast("tuple[int, float]", await done_once(transaction, known_as, "", work))
    return Alias(name, alias, version, at)


async def _target(transaction: Transaction, name: str, alias: str) -> int | None:
    row = await transaction.one(sql.SELECT_ALIAS, (name, alias))
    return None if row is None else int(row[4])


async def _unknown(transaction: Transaction, name: str, version: int) -> StoreError:
    known = ", ".join(str(resource.version) for resource in await versions(transaction, name)) or "none"
    return StoreError(f"there is no version {version} of the resource {name!r}; there are: {known}")
