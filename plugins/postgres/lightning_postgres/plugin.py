"""The store in PostgreSQL, as a plugin; its driver is imported when a store is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl, made_later

if TYPE_CHECKING:
    from lightning.store.protocol import Store
    from lightning_db.keeper import Keeper

SCHEMES = ("postgresql", "postgres")


@hookimpl
def register_stores(register: Callable[[str, Callable[[str], Store]], None]) -> None:
    """`postgresql://` and `postgres://`."""
    for scheme in SCHEMES:
        register(scheme, made_later("lightning_postgres.store:PostgresStore.from_url", "postgres"))


@hookimpl(optionalhook=True)
def register_keepers(register: Callable[[str, Callable[[str], Keeper]], None]) -> None:
    """`postgresql://` and `postgres://`."""
    for scheme in SCHEMES:
        register(scheme, made_later("lightning_postgres.keeper:PostgresKeeper", "postgres"))
