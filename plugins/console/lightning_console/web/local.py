"""The console of a person's own machine: on loopback, open to whoever was shown its address.

The invariant: it listens on this machine alone, and what it was started for, such as a training, never waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from lightning.config import LimitsConfig
from lightning.gateway.connections import Serving, bind
from lightning.store.url import redacted

from lightning_console.places import Places
from lightning_console.web.chat import Chat
from lightning_console.web.desk import Desk
from lightning_console.web.forks import Forks
from lightning_console.web.gate import Gate
from lightning_console.web.shell import Shell
from lightning_console.web.visitors import OwnDoor

HOST = "127.0.0.1"
PATH = "/console"


@dataclass(frozen=True, slots=True)
class LocalConsole:
    """A running console. `url` opens it, with the token that nobody else on the machine knows, and `once` does one time."""

    url: str
    once: str
    ready: asyncio.Task[object]
    """Ends when Gradio has been imported; raises `MissingExtraError` where it is not installed."""


@asynccontextmanager
async def local_console(places: Places, *, port: int = 0, start: str = "runs") -> AsyncIterator[LocalConsole]:
    """Serve the console of a place on loopback; port 0 takes a free one. Raises `GatewayError` for a port that is taken."""
    door, forks = OwnDoor(), Forks()
    desk = Desk(lambda _: places, Chat(None), forks=forks, start=start, where=redacted(places.where))
    shell = Shell(PATH)
    gate = Gate(door, PATH, shell.app, desk.functions)
    serving = Serving(gate, bind(HOST, port), LimitsConfig())
    await serving.start()
    ready: asyncio.Task[object] = asyncio.create_task(shell.app())
    try:
        address = f"{serving.url}{PATH}/?token="
        yield LocalConsole(address + door.token, address + door.once(), ready)
    finally:
        ready.cancel()
        await asyncio.gather(ready, return_exceptions=True)
        gate.close()
        await forks.close()
        await shell.close()
        await serving.stop()
        await places.close()
