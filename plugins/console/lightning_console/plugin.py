"""The plugin of the console. Gradio is imported only when somebody opens the console."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl, later, made_later

if TYPE_CHECKING:
    from lightning_server.protocol import Host, WebApp


@hookimpl
def register_commands(register: Callable[[str, Callable[[], Callable[..., None]]], None]) -> None:
    """Register the command `lightning console`."""
    register(
        "console", later("lightning_console.command:console", "Open a page on which you see your agent learn, and why.")
    )


@hookimpl(optionalhook=True)
def register_web_apps(register: Callable[[str, Callable[[Host], WebApp]], None]) -> None:
    """Register the web app that `lightning serve` answers below `/console`."""
    register("console", made_later("lightning_console.web.consoles:ConsoleApp"))
