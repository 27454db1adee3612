"""Registers what looks after SQLite's files; it is imported when a database is looked after."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl

if TYPE_CHECKING:
    from lightning.maintenance.keeper import Keeper


@hookimpl
def register_keepers(register: Callable[[str, Callable[[str], Keeper]], None]) -> None:
    """`sqlite`."""
    register("sqlite", sqlite_keeper)


def sqlite_keeper(url: str) -> Keeper:
    """See `lightning.maintenance.sqlite`."""
    from lightning.maintenance.sqlite import SqliteKeeper

    return SqliteKeeper(url)
