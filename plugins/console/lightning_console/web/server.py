"""The console on a Lightning Server's port, for the holders of its tokens."""

from __future__ import annotations

from typing import Final

from lightning_server.projects import Projects
from lightning_server.protocol import Host
from starlette.types import Receive, Scope, Send

from lightning_console.places import SERVER, Places
from lightning_console.web.chat import Chat
from lightning_console.web.desk import Desk
from lightning_console.web.gate import Gate
from lightning_console.web.shell import Shell
from lightning_console.web.visitors import TokenDoor, Visitor

WAITS: Final = 2.0
"""Seconds that a page waits for what takes long; it is shown without it then, and completes itself."""


class ConsoleApp:
    """A `WebApp`. Gradio is imported when the first visitor has been let in: a server that nobody looks at pays nothing."""

    def __init__(self, host: Host) -> None:
        self._projects = Projects(host.store)
        self._places: dict[str | None, Places] = {}
        desk = Desk(self._places_of, Chat(host), where=host.url or SERVER, has_login=True)
        self._shell = Shell(host.path)
        secure = host.url.startswith("https://")
        self._gate = Gate(TokenDoor(host.authenticator), host.path, self._shell.app, desk.functions, secure=secure)

    def _places_of(self, who: Visitor) -> Places:
        if who.project not in self._places:
            seen = self._projects.of(who.project)
            self._places[who.project] = Places(SERVER, stores={SERVER: seen}, project=who.project, patience=WAITS)
        return self._places[who.project]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        await self._gate(scope, receive, send)

    async def close(self) -> None:
        """End what was started."""
        self._gate.close()
        await self._shell.close()
