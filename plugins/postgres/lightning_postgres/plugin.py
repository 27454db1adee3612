"""The store in PostgreSQL, as a plugin; its driver is imported when a store is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.errors import import_extra
from lightning.hooks import hookimpl

if TYPE_CHECKING:
    from lightning.store.protocol import Store
    from lightning_db.keeper import Keeper

SCHEMES = ("postgresql", "postgres")


@hookimpl
def register_stores(register: Callable[[str, Callable[[str], Store]], None]) -> None:
    """`postgresql://` and `postgres://`."""
    for scheme in SCHEMES:
        register(scheme, postgres_store)


@hookimpl(optionalhook=True)
def register_keepers(register: Callable[[str, Callable[[str], Keeper]], None]) -> None:
    """`postgresql://` and `postgres://`."""
    for scheme in SCHEMES:
        register(scheme, postgres_keeper)


def postgres_store(url: str) -> Store:
    """See `lightning_postgres.store`. Raises `MissingExtraError` when the driver is not installed."""
    store: Store = import_extra("postgres", "lightning_postgres.store").PostgresStore.from_url(url)
    return store


def postgres_keeper(url: str) -> Keeper:
    """See `lightning_postgres.keeper`. Raises as `postgres_store` does."""
    keeper: Keeper = import_extra("postgres", "lightning_postgres.keeper").PostgresKeeper(url)
    return keeper
