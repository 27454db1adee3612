"""The store in Redis, as a plugin; its client is imported when a store is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.errors import import_extra
from lightning.hooks import hookimpl

if TYPE_CHECKING:
    from lightning.store.protocol import Store
    from lightning_db.keeper import Keeper

SCHEMES = ("redis", "rediss")


@hookimpl
def register_stores(register: Callable[[str, Callable[[str], Store]], None]) -> None:
    """`redis://` and `rediss://`."""
    for scheme in SCHEMES:
        register(scheme, redis_store)


@hookimpl(optionalhook=True)
def register_keepers(register: Callable[[str, Callable[[str], Keeper]], None]) -> None:
    """`redis://` and `rediss://`."""
    for scheme in SCHEMES:
        register(scheme, redis_keeper)


def redis_store(url: str) -> Store:
    """See `lightning_redis.store`. Raises `MissingExtraError` when the client is not installed."""
    store: Store = import_extra("redis", "lightning_redis.store").RedisStore.from_url(url)
    return store


def redis_keeper(url: str) -> Keeper:
    """See `lightning_redis.keeper`. Raises as `redis_store` does."""
    keeper: Keeper = import_extra("redis", "lightning_redis.keeper").RedisKeeper(url)
    return keeper
