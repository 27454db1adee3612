"""Registers the built-in stores, and what looks after SQLite's files; each is imported only when its scheme is used.

Stores and keepers are one plugin: where SQLite's stores can be opened, what would bring their schema forward is seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl

if TYPE_CHECKING:
    from lightning.maintenance.keeper import Keeper
    from lightning.store.protocol import Store


@hookimpl
def register_stores(register: Callable[[str, Callable[[str], Store]], None]) -> None:
    """The schemes of the built-in stores."""
    register("memory", _memory)
    register("sqlite", _sqlite)


@hookimpl
def register_keepers(register: Callable[[str, Callable[[str], Keeper]], None]) -> None:
    """`sqlite`."""
    register("sqlite", _sqlite_keeper)


def _memory(url: str) -> Store:
    from lightning.store.memory import MemoryStore

    return MemoryStore.from_url(url)


def _sqlite(url: str) -> Store:
    from lightning.store.sqlite import SqliteStore

    return SqliteStore.from_url(url)


def _sqlite_keeper(url: str) -> Keeper:
    from lightning.maintenance.sqlite import SqliteKeeper

    return SqliteKeeper(url)
