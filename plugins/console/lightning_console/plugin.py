"""The console, as a plugin; Gradio is imported when it is opened."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl, later

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
    register("console", console_app)


def console_app(host: Host) -> WebApp:
    """The console on a server's port."""
    from lightning_console.web.consoles import ConsoleApp

    return ConsoleApp(host)
