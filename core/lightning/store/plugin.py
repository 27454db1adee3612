"""Registers the built-in stores; each is imported only when its scheme is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl, made_later

if TYPE_CHECKING:
    from lightning.store.protocol import Store


@hookimpl
def register_stores(register: Callable[[str, Callable[[str], Store]], None]) -> None:
    """The schemes of the built-in stores."""
    register("memory", made_later("lightning.store.memory:MemoryStore.from_url"))
    register("sqlite", made_later("lightning.store.sqlite:SqliteStore.from_url"))
