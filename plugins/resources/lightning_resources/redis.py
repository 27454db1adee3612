"""Resources in Redis. The hash `resources` has the kinds by name. Each resource has the hashes `resources:versions` by number,
`resources:contents` by digest and `resources:aliases`; each alias has the list `resources:moves`.

The invariant: it keeps what `lightning_resources.operations` promises.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from lightning.errors import ConflictError, StoreError
from lightning.store import rollout_state, rows
from lightning_redis import lua_scripts
from lightning_redis.keys import encoded
from lightning_redis.loop_client import Link, done
from lightning_redis.records import stamped
from lightning_redis.rollout_codec import listed

from lightning_resources.nouns import LATEST, Alias, Resource, ResourceUse, check_alias, no_version, uses_of_versions
from lightning_resources.sql import read

PUT: Final = lua_scripts.script(
    "put_resource",
    """
-- keys: kinds versions contents
-- arguments: name kind digest text
-- Content that comes again is the version that it is.

local kept = redis.call('HGET', kinds, name)
if kept and kept ~= kind then return {'kind', kept} end
local version = redis.call('HGET', contents, digest)
if not version then
  version = redis.call('HLEN', versions) + 1
  redis.call('HSET', kinds, name, kind)
  redis.call('HSET', contents, digest, version)
  redis.call('HSET', versions, version, now .. ' ' .. text)
end
return {'ok', tonumber(version), redis.call('HGET', versions, version)}
""",
)
SET_ALIAS: Final = lua_scripts.script(
    "set_alias",
    """
-- keys: versions aliases moves once
-- arguments: alias version name seconds
-- A move is its version, its time and the place of the move to return to.

local before = recalled() or recalled_as(name, once)
if before then return before end
if redis.call('HEXISTS', versions, version) == 0 then return {'unknown'} end
local last = redis.call('LINDEX', moves, -1)
if last then
  local target, at = string.match(last, '^(%S+) (%S+) ')
  if target == version then return remember_as(name, once, seconds, {'ok', target, at}) end
end
redis.call('RPUSH', moves, version .. ' ' .. now .. ' ' .. (redis.call('LLEN', moves) - 1))
redis.call('HSET', aliases, alias, version .. ' ' .. now)
return remember_as(name, once, seconds, {'ok', version, now})
""",
)
ROLL_BACK: Final = lua_scripts.script(
    "roll_back_alias",
    """
-- keys: aliases moves once
-- arguments: alias name seconds
-- The place that the earlier move would have returned to is taken over, so that rolling back again goes on.

local before = recalled() or recalled_as(name, once)
if before then return before end
local last = redis.call('LINDEX', moves, -1)
if not last then return {'unknown'} end
local target, place = string.match(last, '^(%S+) %S+ (%S+)$')
if tonumber(place) < 0 then return {'first', target} end
local version, further = string.match(redis.call('LINDEX', moves, place), '^(%S+) %S+ (%S+)$')
redis.call('RPUSH', moves, version .. ' ' .. now .. ' ' .. further)
redis.call('HSET', aliases, alias, version .. ' ' .. now)
return remember_as(name, once, seconds, {'ok', version, now})
""",
)


async def put(link: Link, resource: Resource) -> Resource:
    """Store a resource as the next version of its name, unless a version has its content."""
    name, what = resource.name, f"the resource {resource.name!r}"
    content = rows.dump(resource.content, what)
    metadata = rows.dump(dict(resource.metadata), f"the metadata of {what}")
    kind, digest = resource.kind.value, resource.digest
    version, value = done(
        await link.run(
            PUT,
            [
                link.keys("resources"),
                link.keys("resources", "versions", name),
                link.keys("resources", "contents", name),
            ],
            *(name, kind, digest, rows.dump([kind, content, metadata, digest])),
        ),
        kind=lambda rest: ConflictError(f"{what} is a {rest[0].decode()}, not a {kind}: give it another name"),
    )
    return _resource(name, version, value)


def _resource(name: str, version: int, value: bytes) -> Resource:
    (at,), (kind, content, metadata, digest) = stamped(value, f"version {version} of resource {name!r}")
    return read((name, content, kind, metadata, version, at, digest))


async def get(link: Link, name: str, which: int | str) -> Resource | None:
    """Return a version by its number or by an alias; None when there is none."""
    versions = link.keys("resources", "versions", name)
    if which == LATEST:
        (which,) = await link.reads.read((b"HLEN", versions))
    elif isinstance(which, str):
        (target,) = await link.reads.read((b"HGET", link.keys("resources", "aliases", name), encoded(which)))
        which = 0 if target is None else int(target.split()[0])
    (value,) = await link.reads.read((b"HGET", versions, encoded(int(which))))
    return None if value is None else _resource(name, int(which), value)


async def versions(link: Link, name: str | None) -> list[Resource]:
    """Return all versions of a resource (None: of all resources), by name and version."""
    names = await _names(link, name)
    found = []
    for each, flat in zip(names, await _tables(link, "versions", names), strict=True):
        numbered = sorted((int(version), value) for version, value in zip(flat[::2], flat[1::2], strict=True))
        found += [_resource(each, version, value) for version, value in numbered]
    return found


async def _names(link: Link, name: str | None) -> list[str]:
    if name is not None:
        return [name]
    (names,) = await link.reads.read((b"HKEYS", link.keys("resources")))
    return sorted(each.decode() for each in names)


async def _tables(link: Link, table: str, names: Sequence[str]) -> list[list[bytes]]:
    """Return the whole hash `table` of each resource, as alternating fields and values."""
    return (
        await link.reads.read(*((b"HGETALL", link.keys("resources", table, name)) for name in names)) if names else []
    )


async def set_alias(link: Link, name: str, alias: str, version: int, once: str) -> Alias:
    """Point an alias to a version; nothing changes when it points there already."""
    check_alias(alias)
    reply = await link.run_once(
        SET_ALIAS,
        [link.keys("resources", "versions", name), link.keys("resources", "aliases", name), _moves(link, name, alias)],
        rollout_state.known_as(once, "set_alias", name, alias, version),
        *(alias, version),
    )
    if reply[0] == "unknown":
        raise no_version(version, name, await versions(link, name))
    moved_to, at = done(reply)
    return Alias(name, alias, int(moved_to), float(at))


async def roll_back(link: Link, name: str, alias: str, once: str) -> Alias:
    """Point an alias back to its previous version."""
    known_as = rollout_state.known_as(once, "roll_back_alias", name, alias)
    keys = [link.keys("resources", "aliases", name), _moves(link, name, alias)]
    version, at = done(
        await link.run_once(ROLL_BACK, keys, known_as, alias),
        unknown=lambda _: StoreError(
            f"the resource {name!r} has no alias {alias!r}: `lightning resources ls` shows those there are"
        ),
        first=lambda rest: StoreError(
            f"{name}@{alias} has always been version {rest[0].decode()}: there is nothing to return to"
        ),
    )
    return Alias(name, alias, int(version), float(at))


def _moves(link: Link, name: str, alias: str) -> bytes:
    return link.keys("resources", "moves", rows.dump([name, alias]))


async def aliases(link: Link, name: str | None) -> list[Alias]:
    """Return where the aliases of a resource (None: of all) point now, with `latest`."""
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
    """Return every move of an alias, oldest first."""
    (moves,) = await link.reads.read((b"LRANGE", _moves(link, name, alias), b"0", b"-1"))
    found = [move.split() for move in moves]
    return [Alias(name, alias, int(version), float(at)) for version, at, _ in found]


async def uses(link: Link, name: str) -> list[ResourceUse]:
    """Return the results of rollouts under each version of a resource."""
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
    return uses_of_versions(name, found)


FUNCTIONS: Final[Mapping[str, Callable[..., Awaitable[Any]]]] = {
    "put_resource": put,
    "get_resource": get,
    "list_resources": versions,
    "set_alias": set_alias,
    "roll_back_alias": roll_back,
    "list_aliases": aliases,
    "alias_history": history,
    "resource_uses": uses,
}
"""The functions of the operations, by the operations' names."""
