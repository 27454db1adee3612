"""The console, as a plugin; Gradio is imported when it is opened."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl, later, made_later

if TYPE_CHECKING:
    from lightning_server.protocol import Host, WebApp


@hookimpl
def register_commands(register: Callable[[str, Callable[[], Callable[..., None]]], None]) -> None:
    """The command of this plugin."""
    register(
        "console", later("lightning_console.command:console", "Open a page on which you see your agent learn, and why.")
    )


@hookimpl(optionalhook=True)
def register_web_apps(register: Callable[[str, Callable[[Host], WebApp]], None]) -> None:
    """`/console` of `lightning serve`."""
    register("console", made_later("lightning_console.web.consoles:ConsoleApp"))
