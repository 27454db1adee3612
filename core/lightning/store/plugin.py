"""Registers the built-in stores; each is imported only when its scheme is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl

if TYPE_CHECKING:
    from lightning.store.protocol import Store


@hookimpl
def register_stores(register: Callable[[str, Callable[[str], Store]], None]) -> None:
    """The schemes of the built-in stores."""
    register("memory", _memory)
    register("sqlite", _sqlite)


def _memory(url: str) -> Store:
    from lightning.store.memory import MemoryStore

    return MemoryStore.from_url(url)


def _sqlite(url: str) -> Store:
    from lightning.store.sqlite import SqliteStore

    return SqliteStore.from_url(url)
