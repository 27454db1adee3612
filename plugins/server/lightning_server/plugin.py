"""Stores at `http://` and `https://`, and `lightning runner`, as a plugin."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl

if TYPE_CHECKING:
    from lightning.store.protocol import Store


@hookimpl
def register_stores(register: Callable[[str, Callable[[str], Store]], None]) -> None:
    """`http` and `https`."""
    register("http", _http_store)
    register("https", _http_store)


@hookimpl
def register_commands(register: Callable[[str, Callable[[], Callable[..., None]]], None]) -> None:
    """`lightning runner`."""
    register("runner", _runner)


def _http_store(url: str) -> Store:
    from lightning_server.http_store import HttpStore

    return HttpStore.from_url(url)


def _runner() -> Callable[..., None]:
    """Run an agent for Lightning Servers, on any machine."""
    from lightning_server.runner_command import runner

    return runner
