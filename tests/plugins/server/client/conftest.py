"""What the tests of clients share: servers over one database, a scripted policy server, and a trainer's word of where it is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import aiohttp
import pytest
from lightning.config import Config, with_settings
from lightning.gateway import Gateway, Upstream
from lightning.gateway.identity import gateway_secret
from lightning.store.memory import MemoryStore
from lightning.testing.fake_vllm import FakeVLLM
from lightning.types import LLM, Rollout, Run, Scope, Task
from lightning_server.auth import issue_token
from lightning_server.client import Client
from lightning_server.control import Control
from lightning_server.fleet.owner import Owner
from lightning_server.tokens import put_token

RUN = "run-1"


async def calling(task: Task, llm: LLM) -> float:
    """An agent that calls the model once; the reward is its task's number."""
    body = {"model": llm.model, "messages": [{"role": "user", "content": str(task.input)}]}
    async with (
        aiohttp.ClientSession(headers={"authorization": f"Bearer {llm.api_key}"}) as session,
        session.post(f"{llm.base_url}/chat/completions", json=body) as reply,
    ):
        reply.raise_for_status()
        await reply.read()
    return float(str(task.input))


class Wire:
    """What clients reach a server through; it can be cut, as a server's death cuts every connection, and mended."""

    def __init__(self, port: int) -> None:
        self._to, self.port = port, 0
        self._open: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def mend(self) -> None:
        self._server = await asyncio.start_server(self._pass_on, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in list(self._open):
            writer.transport.abort()
        self._server = None

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._to)
        self._open |= {writer, back}
        try:
            await asyncio.gather(_copy(reader, back), _copy(there, writer))
        finally:
            self._open -= {writer, back}
            for one in (writer, back):
                one.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()


@dataclass
class Server:
    """One server of the site, behind a wire."""

    gateway: Gateway
    control: Control
    wire: Wire

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.wire.port}"

    async def stop(self) -> None:
        if self.wire._server is not None:
            await self.wire.cut()
        await self.control.close()
        await self.gateway.close()


@dataclass
class Site:
    """A database, a policy server, and as many servers as a test starts. `run` is one run that a trainer has begun."""

    store: MemoryStore
    fake: FakeVLLM
    config: Config
    tokens: dict[Scope, str] = field(default_factory=dict)
    servers: list[Server] = field(default_factory=list)

    async def begin(self, run: str = RUN, count: int = 0, **fields: object) -> None:
        """A run with `count` rollouts, whose policy server every server learns of from the store."""
        await self.store.put_run(Run(run, run))
        await Owner(self.store, run).open([Upstream(self.fake.url, self.fake.model)], 0)
        await self.add(count, run, **fields)

    async def add(self, count: int, run: str = RUN, **fields: object) -> None:
        made = [Rollout(f"{run}/{n}", run, Task(n), "group", index=n, **fields) for n in range(count)]  # type: ignore[arg-type]
        await self.store.create_rollouts(made)

    async def start(self) -> Server:
        gateway = Gateway(self.store, [], self.config.gateway, secret=await gateway_secret(self.store), shared=True)
        control = Control(self.store, gateway, self.config)
        await gateway.start()
        wire = Wire(int(gateway.url.rpartition(":")[2]))
        await wire.mend()
        self.servers.append(Server(gateway, control, wire))
        return self.servers[-1]

    def client(self, *servers: Server, agent: object = calling, **settings: object) -> Client:
        """A client with agents in this process; `settings` are the client's own arguments, or the configuration's."""
        own = {name: settings.pop(name) for name in ("rollouts", "idle", "runs", "token") if name in settings}
        config = with_settings(self.config, {name.replace("__", "."): value for name, value in settings.items()})
        token = own.pop("token", self.tokens[Scope.RUNNER])
        urls = [server.url for server in servers]
        return Client(urls, agent, token=token, runner="inline", config=config, **own)  # type: ignore[arg-type]

    async def rollouts(self, run: str = RUN) -> dict[str, Rollout]:
        return {rollout.id: rollout for rollout in (await self.store.list_rollouts(run)).items}


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    config = with_settings(Config(), {"runner.concurrency": 4, "runner.timeout": 60, "runner.lease_ttl": 60})
    async with AsyncExitStack() as resources:
        fake = await resources.enter_async_context(FakeVLLM())
        store = MemoryStore()
        await store.open()
        resources.push_async_callback(store.close)
        made = Site(store, fake, config)
        for scope in (Scope.RUNNER, Scope.VIEWER):
            token, made.tokens[scope] = issue_token(scope)
            await put_token(store, token)
        yield made
        for server in made.servers:
            await server.stop()
