"""The console, as a plugin; Gradio is imported when it is opened."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl

if TYPE_CHECKING:
    from lightning.server.protocol import Host, Site


@hookimpl
def register_commands(register: Callable[[str, Callable[[], Callable[..., None]]], None]) -> None:
    """The command of this plugin."""
    register("console", console_command)


@hookimpl
def register_sites(register: Callable[[str, Callable[[Host], Site]], None]) -> None:
    """`/console` of `lightning serve`."""
    register("console", console_site)


def console_command() -> Callable[..., None]:
    """Open a page on which you see your agent learn, and why."""
    from lightning_console.command import console

    return console


def console_site(host: Host) -> Site:
    """The console on a server's port."""
    from lightning_console.web.site import ConsoleSite

    return ConsoleSite(host)
