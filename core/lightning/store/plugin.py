"""Registers the built-in stores; each is imported only when its scheme is used."""

from __future__ import annotations

from collections.abc import Callable

import pluggy

from lightning.store.protocol import Store

hookimpl = pluggy.HookimplMarker("lightning")
"""The same marker as `lightning.hookimpl`, which lives on a higher floor than the store."""


def _memory(url: str) -> Store:
    from lightning.store.memory import MemoryStore

    return MemoryStore.from_url(url)


def _sqlite(url: str) -> Store:
    from lightning.store.sqlite import SqliteStore

    return SqliteStore.from_url(url)


def _http(url: str) -> Store:
    from lightning.store.http import HttpStore

    return HttpStore.from_url(url)


@hookimpl
def register_stores(register: Callable[[str, Callable[[str], Store]], None]) -> None:
    """The schemes of the built-in stores."""
    register("memory", _memory)
    register("sqlite", _sqlite)
    register("http", _http)
    register("https", _http)
