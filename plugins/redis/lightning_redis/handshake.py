"""Checks of each new connection, and the mark that makes a prefix a store.

The invariant: a server that would lose acknowledged writes is refused, and nothing is written under a prefix that belongs to
another program or has another schema.

An append-only file alone does not guarantee that acknowledged writes are kept. With `appendfsync everysec` Redis answers at
once, and delays the append for up to two seconds while the disk is still syncing: a `kill -9` in that time loses the writes.
`always` and `no` append before they answer, and `always` also survives a power cut. So `everysec`, Redis' default, must be
accepted in the URL.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Awaitable, Callable
from typing import Final

from lightning.errors import ConfigError, LightningError, SchemaError, StoreError
from lightning.store.schema import SCHEMA, refuse_other_schema
from redis.exceptions import BusyLoadingError, ReadOnlyError, ResponseError

from lightning_redis.connection import Command, Reply
from lightning_redis.keys import Keys
from lightning_redis.settings import Settings

PROGRAM: Final = "lightning"
OLDEST: Final = (6, 2)

Ask = Callable[..., Awaitable[Reply]]
"""Sends one command and returns the reply; raises an error reply."""


async def check_server(ask: Ask, settings: Settings) -> None:
    """Raise `StoreError` for a server that cannot keep a store (too old, a cluster, evicting keys) or is less durable than the
    URL demands; `BusyLoadingError` while it is loading, `ReadOnlyError` while it is a replica."""
    info = _info(await ask(b"INFO"))
    if info.get("loading") == "1":  # while it loads, its append-only file is reported as off
        raise BusyLoadingError("Redis is loading what it has kept")
    where = f"store {settings.place}"
    if info.get("role") == "slave":  # its data may be old; in a failover it may become the master
        raise ReadOnlyError("this Redis is a replica: name its master in the URL")
    version = tuple(int(part) for part in info.get("redis_version", "0.0").split(".")[:2])
    if version < OLDEST:
        raise StoreError(f"{where} runs Redis {info.get('redis_version')}: a store needs 6.2 or newer, upgrade it")
    if info.get("cluster_enabled") == "1":
        raise StoreError(f"{where} is a Redis Cluster, which cannot keep a store: use a single server")
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise StoreError(
            f"{where} has maxmemory-policy {policy} and would delete what it was given when memory gets short. Run: "
            "redis-cli CONFIG SET maxmemory-policy noeviction, and put the same into redis.conf"
        )
    if settings.durability == "none":
        return
    if info.get("aof_enabled") != "1":
        raise StoreError(
            f"{where} keeps no append-only file and would lose everything when it stops. Run: "
            "redis-cli CONFIG SET appendonly yes, and redis-cli CONFIG SET appendfsync always, and put the same into "
            "redis.conf; or say ?durability=none in the URL if nothing needs to be kept"
        )
    if settings.durability != "everysec":
        await _check_sync(ask, settings, where)


async def _check_sync(ask: Ask, settings: Settings, where: str) -> None:
    try:
        found = await ask(b"CONFIG", b"GET", b"*appendfsync*")
    except ResponseError as error:
        raise StoreError(
            f"{where} does not tell whether it appends before it answers ({error}): let the user run CONFIG GET, or say "
            "?durability=everysec in the URL if losing up to two seconds of what was acknowledged is acceptable"
        ) from error
    values = [value.decode() for value in found]
    config = dict(zip(values[::2], values[1::2], strict=True))
    sync = config.get("appendfsync")
    wanted = ("always",) if settings.durability == "power" else ("always", "no")
    if sync not in wanted:
        raise StoreError(
            f"{where} has appendfsync {sync}: {'a power cut' if settings.durability == 'power' else 'a kill -9 of Redis'} "
            "could lose what was acknowledged. Run: redis-cli CONFIG SET appendfsync always, and put the same into "
            "redis.conf; or say ?durability=everysec in the URL if losing up to two seconds is acceptable"
        )
    if settings.durability == "power" and config.get("no-appendfsync-on-rewrite") == "yes":
        raise StoreError(
            f"{where} does not sync while it rewrites its file. Run: redis-cli CONFIG SET no-appendfsync-on-rewrite no, and "
            "put the same into redis.conf"
        )


async def check_mark(ask: Ask, settings: Settings, keys: Keys, make: bool) -> str:
    """Return the id of the database under the prefix; with `make` create it if there is none. Raises `SchemaError` for keys of
    another program or schema, `ConfigError` where there is none and `make` is false."""
    where = f"store {settings.place}"
    mark = await _mark(ask, where, keys)
    if mark is None and not make:
        raise ConfigError(
            f"there is no store at {settings.place}: name its database and its ?prefix= as whoever made it did"
        )
    if mark is None:
        foreign = await _any_key(ask, settings)
        if (
            foreign is not None and await _mark(ask, where, keys) is None
        ):  # else another process made the store meanwhile
            raise SchemaError(
                f"{where}: other keys begin with this prefix already ({foreign}): choose another ?prefix="
            )
        made = json.dumps({"program": PROGRAM, "schema": SCHEMA, "id": uuid.uuid4().hex})
        await ask(b"SET", keys("meta"), made.encode(), b"NX")  # another process may have been faster
        mark = await _mark(ask, where, keys)
    return _read(mark, where, keys)


def _read(mark: bytes | None, where: str, keys: Keys) -> str:
    """Return the id of the database in a mark. Raises `SchemaError`."""
    try:
        found = json.loads(mark or b"")
        program, schema, database = found["program"], found["schema"], found["id"]
    except (ValueError, TypeError, KeyError) as error:
        raise SchemaError(
            f"{where}: the key {keys('meta').decode()} is damaged or another program's: restore it from a backup, "
            "or choose another ?prefix="
        ) from error
    refuse_other_schema(where, schema if program == PROGRAM else found)
    return str(database)


async def check_same(ask: Ask, settings: Settings, keys: Keys, database: str) -> None:
    """Raise `StoreError` unless the database is the one that was opened: a server may come back empty, or be replaced by
    another."""
    mark = await _mark(ask, f"store {settings.place}", keys)
    try:
        found = json.loads(mark or b"{}").get("id")
    except (ValueError, AttributeError):
        found = None
    if found != database:
        raise StoreError(
            f"store {settings.place} is not the database that was opened: it came back empty or another took its place. "
            "Bring the old one back, or start anew"
        )


async def _mark(ask: Ask, where: str, keys: Keys) -> bytes | None:
    try:
        found: bytes | None = await ask(b"GET", keys("meta"))
    except ResponseError as error:
        if not str(error).startswith("WRONGTYPE"):
            raise
        raise SchemaError(
            f"{where}: the key {keys('meta').decode()} is another program's: choose another ?prefix="
        ) from error
    return found


async def _any_key(ask: Ask, settings: Settings) -> str | None:
    pattern = f"{settings.prefix}:*".encode()  # the prefix has no wildcard characters
    cursor = b"0"
    while True:
        cursor, found = await ask(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"1000")
        if found:
            return str(found[0].decode(errors="replace"))
        if cursor == b"0":
            return None


def _info(reply: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in reply.decode(errors="replace").splitlines())
    return {name: value for name, colon, value in lines if colon}


def asker(exchange: Callable[[list[Command]], Awaitable[list[Reply]]]) -> Ask:
    """Make an `Ask` from a function that exchanges whole batches."""

    async def ask(*command: bytes) -> Reply:
        (reply,) = await exchange([command])
        if isinstance(reply, ResponseError | LightningError):
            raise reply
        return reply

    return ask
