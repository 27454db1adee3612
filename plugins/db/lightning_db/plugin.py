"""Registers `lightning db`, the hook for keepers of databases, and the keeper of SQLite files, as a plugin."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl, hookspec, later, made_later

if TYPE_CHECKING:
    import typer

    from lightning_db.keeper import Keeper


@hookspec
def register_keepers(register: Callable[[str, Callable[[str], Keeper]], None]) -> None:
    """Keepers by URL scheme: a function from the URL to a `lightning_db.keeper.Keeper`.

    `lightning db` inspects, copies and prunes a database with it.
    """


@hookimpl(specname="register_keepers")
def register_sqlite(register: Callable[[str, Callable[[str], Keeper]], None]) -> None:
    """`sqlite`."""
    register("sqlite", made_later("lightning_db.sqlite:SqliteKeeper"))


@hookimpl
def register_commands(register: Callable[[str, Callable[[], typer.Typer]], None]) -> None:
    """`db`."""
    register("db", later("lightning_db.command:app", "Maintain a database: status, backup, restore, prune, export."))
