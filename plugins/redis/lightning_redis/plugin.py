"""The plugin `redis`: the store in Redis, whose client is imported when a store is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl, made_later

if TYPE_CHECKING:
    from lightning.store.protocol import Store
    from lightning_db.keeper import Keeper

SCHEMES = ("redis", "rediss")


@hookimpl
def register_stores(register: Callable[[str, Callable[[str], Store]], None]) -> None:
    """Register the store for URLs of `redis://` and `rediss://`."""
    for scheme in SCHEMES:
        register(scheme, made_later("lightning_redis.store:RedisStore.from_url", "redis"))


@hookimpl(optionalhook=True)
def register_keepers(register: Callable[[str, Callable[[str], Keeper]], None]) -> None:
    """Register the keeper of databases for URLs of `redis://` and `rediss://`."""
    for scheme in SCHEMES:
        register(scheme, made_later("lightning_redis.keeper:RedisKeeper", "redis"))
