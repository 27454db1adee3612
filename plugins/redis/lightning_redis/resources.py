"""Resources: versions that never change, and aliases that move between them.

The invariant: a version is written once and read back as it was written; an alias points to a version that exists, and each of
its moves is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning.errors import ConflictError, StoreError
from lightning.store import rollout_state, rows
from lightning.store.protocol import LATEST, Alias, ResourceUse
from lightning.types import Resource

from lightning_redis import lua_scripts
from lightning_redis.keys import encoded
from lightning_redis.loop_client import Link, done
from lightning_redis.records import listed, stamped


async def put(link: Link, resource: Resource) -> Resource:
    """See `Store.put_resource`."""
    name, what = resource.name, f"the resource {resource.name!r}"
    content = rows.dump(resource.content, what)
    metadata = rows.dump(dict(resource.metadata), f"the metadata of {what}")
    kind, digest = resource.kind.value, resource.digest
    version, value = done(
        await link.run(
            lua_scripts.PUT_RESOURCE,
            [link.keys("kinds"), link.keys("versions", name), link.keys("contents", name)],
            *(name, kind, digest, rows.dump([kind, content, metadata, digest])),
        ),
        kind=lambda rest: ConflictError(f"{what} is a {rest[0].decode()}, not a {kind}: give it another name"),
    )
    return _resource(name, version, value)


def _resource(name: str, version: int, value: bytes) -> Resource:
    (at,), (kind, content, metadata, digest) = stamped(value, f"version {version} of resource {name!r}")
    return rows.resource_from_row((name, kind, content, metadata, version, at, digest))


async def get(link: Link, name: str, which: int | str) -> Resource | None:
    """See `Store.get_resource`."""
    versions = link.keys("versions", name)
    if which == LATEST:
        (which,) = await link.reads.read((b"HLEN", versions))
    elif isinstance(which, str):
        (target,) = await link.reads.read((b"HGET", link.keys("aliases", name), encoded(which)))
        which = 0 if target is None else int(target.split()[0])
    (value,) = await link.reads.read((b"HGET", versions, encoded(int(which))))
    return None if value is None else _resource(name, int(which), value)


async def versions(link: Link, name: str | None) -> list[Resource]:
    """See `Store.list_resources`."""
    names = await _names(link, name)
    found = []
    for each, flat in zip(names, await _tables(link, "versions", names), strict=True):
        numbered = sorted((int(version), value) for version, value in zip(flat[::2], flat[1::2], strict=True))
        found += [_resource(each, version, value) for version, value in numbered]
    return found


async def _names(link: Link, name: str | None) -> list[str]:
    if name is not None:
        return [name]
    (names,) = await link.reads.read((b"HKEYS", link.keys("kinds")))
    return sorted(each.decode() for each in names)


async def _tables(link: Link, table: str, names: Sequence[str]) -> list[list[bytes]]:
    """The whole table of each resource."""
    return await link.reads.read(*((b"HGETALL", link.keys(table, name)) for name in names)) if names else []


async def set_alias(link: Link, name: str, alias: str, version: int, once: str) -> Alias:
    """See `Store.set_alias`."""
    rollout_state.check_alias(alias)
    reply = await link.run_once(
        lua_scripts.SET_ALIAS,
        [link.keys("versions", name), link.keys("aliases", name), _moves(link, name, alias)],
        rollout_state.known_as(once, "set_alias", name, alias, version),
        *(alias, version),
    )
    if reply[0] == "unknown":
        known = ", ".join(str(resource.version) for resource in await versions(link, name)) or "none"
        raise StoreError(f"there is no version {version} of the resource {name!r}; there are: {known}")
    moved_to, at = done(reply)
    return Alias(name, alias, int(moved_to), float(at))


async def roll_back(link: Link, name: str, alias: str, once: str) -> Alias:
    """See `Store.roll_back_alias`."""
    known_as = rollout_state.known_as(once, "roll_back_alias", name, alias)
    keys = [link.keys("aliases", name), _moves(link, name, alias)]
    version, at = done(
        await link.run_once(lua_scripts.ROLL_BACK_ALIAS, keys, known_as, alias),
        unknown=lambda _: StoreError(
            f"the resource {name!r} has no alias {alias!r}: `lightning resources ls` shows those there are"
        ),
        first=lambda rest: StoreError(
            f"{name}@{alias} has always been version {rest[0].decode()}: there is nothing to return to"
        ),
    )
    return Alias(name, alias, int(version), float(at))


def _moves(link: Link, name: str, alias: str) -> bytes:
    return link.keys("moves", rows.dump([name, alias]))


async def aliases(link: Link, name: str | None) -> list[Alias]:
    """See `Store.list_aliases`."""
    names = await _names(link, name)
    found = []
    for each, flat in zip(names, await _tables(link, "aliases", names), strict=True):
        for alias, value in zip(flat[::2], flat[1::2], strict=True):
            version, at = value.split()
            found.append(Alias(each, alias.decode(), int(version), float(at)))
        newest = await get(link, each, LATEST)
        if newest is not None:
            found.append(Alias(each, LATEST, newest.version, newest.created_at))
    return sorted(found, key=lambda alias: (alias.name, alias.alias))


async def history(link: Link, name: str, alias: str) -> list[Alias]:
    """See `Store.alias_history`."""
    (moves,) = await link.reads.read((b"LRANGE", _moves(link, name, alias), b"0", b"-1"))
    found = [move.split() for move in moves]
    return [Alias(name, alias, int(version), float(at)) for version, at, _ in found]


async def uses(link: Link, name: str) -> list[ResourceUse]:
    """See `Store.resource_uses`."""
    (flat,) = await link.reads.read((b"HGETALL", link.keys("uses")))
    counted: dict[str, dict[str, float]] = {}
    for field, value in zip(flat[::2], flat[1::2], strict=True):
        what, _, text = field.decode().partition(" ")
        counted.setdefault(text, {})[what] = float(value)
    found = []
    for text, counts in counted.items():
        run, split, resources = listed(text, "the uses of resources")
        numbers = (int(counts.get(what, 0)) for what in ("rollouts", "scored", "failed"))
        found.append((run, split, resources, *numbers, counts.get("reward")))
    return rollout_state.uses_of_versions(name, found)
