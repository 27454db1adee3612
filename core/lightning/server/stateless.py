"""A Lightning Server with nothing of its own: control API, gateway and span ingest over a shared database, on one port.

The invariant: whatever it knows is in the store, so any number of such servers over one database answer any request of any
client, and one that is killed costs the calls that were going through it and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from lightning.config import Config
from lightning.errors import ConfigError
from lightning.gateway import Gateway
from lightning.gateway.fleet.records import gateway_secret
from lightning.plugins import plugins
from lightning.server.control import (
    RUNNER_FILE,
    Control,
    first_admin_token,
    on_server_port,
    project_of,
    runner_token,
    token_file,
)
from lightning.server.exposure import check_exposure
from lightning.store.protocol import Store
from lightning.store.url import redacted


@dataclass(frozen=True, slots=True)
class Server:
    """A running server. `admin_file` has the first admin token when this server has made it, `runner_file` a token for
    runners; None where nobody has put one into the folder."""

    url: str
    store: Store
    admin_file: Path | None
    runner_file: Path | None

    async def wait(self, seconds: float | None = None) -> None:
        """Return after `seconds`; without them, never."""
        await (asyncio.Event().wait() if seconds is None else asyncio.sleep(seconds))


@asynccontextmanager
async def serve_store(url: str, config: Config, folder: Path) -> AsyncIterator[Server]:
    """Serve the database at a store's URL on the port of the section `server`. First tokens are written into `folder`: that for
    runners is for the project `trainer.project`, unless a good one of any project is there, such as a trainer's.

    The policy servers are those that trainers name in the store. Raises `ConfigError` for a URL of a server, and for a bind
    beyond loopback before anybody has made a token; otherwise what the rooms raise.
    """
    if url.partition("://")[0] in ("http", "https"):
        raise ConfigError(
            f"{redacted(url)} is a server: a server needs the database itself, as postgresql://, redis:// or sqlite:///"
        )
    project = project_of(config)
    async with AsyncExitStack() as resources:
        store = plugins().store(url)
        await store.open()
        resources.push_async_callback(store.close)
        await check_exposure(store, config.server.host, place=url)
        settings = on_server_port(config).gateway
        gateway = Gateway(store, [], settings, secret=await gateway_secret(store), shared=True)
        resources.push_async_callback(gateway.close)
        control = Control(store, gateway, config)
        resources.push_async_callback(control.close)
        await gateway.start()
        admin = await first_admin_token(store, folder)
        file = token_file(store, folder, RUNNER_FILE)
        if admin is not None or file.is_file():
            file, _ = await runner_token(store, folder, project)
        yield Server(control.url, store, admin, file if file.is_file() else None)
