"""A store, a server as it stands in the world, and everybody who might attack it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import orjson
import pytest
from lightning.config import Config, GatewayConfig
from lightning.gateway import Gateway, Upstream
from lightning.store import Store
from lightning.store.memory import MemoryStore
from lightning.testing.fake_vllm import FakeVLLM
from lightning.types import LLM, CallStatus, Rollout, Run, Scope, Task
from lightning_resources.nouns import Resource
from lightning_resources.operations import list_resources, put_resource
from lightning_server.auth import issue_token
from lightning_server.config import PortLimits
from lightning_server.control import Control
from lightning_server.tokens import list_tokens, put_token

API = "/api/v1"
SECRET = b"the signing secret of the test"
CHAT = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
TIGHT = {
    "limits": PortLimits(header_timeout=0.2, body_timeout=0.2, failures_per_minute=30),
    "max_body_bytes": 100_000,
}


@dataclass
class House:
    """A gateway with the control API before a fake vLLM.

    The project `default` has the run `run` (`run/0` leased by `w`, with the key `agent`; `run/1` pending), the project `theirs`
    the run `theirs` (`theirs/0` leased by `w`, `theirs/1` pending).
    """

    store: Store
    gateway: Gateway
    fake: FakeVLLM
    client: httpx.AsyncClient
    agent: LLM
    tokens: dict[str, str] = field(default_factory=dict)

    async def ask(
        self, method: str, path: str, token: str = "", body: object = None, headers: dict[str, str] | None = None
    ) -> httpx.Response:
        """Ask as the holder of a token: one of `tokens` by its name, or any text."""
        plain = self.tokens.get(token, token)
        sent = {**({"authorization": f"Bearer {plain}"} if plain else {}), **(headers or {})}
        content = body if isinstance(body, bytes) else None if body is None else orjson.dumps(body)
        return await self.client.request(method, path, content=content, headers=sent)

    async def api(self, method: str, path: str, token: str = "", body: object = None) -> httpx.Response:
        """The same, of the control API."""
        return await self.ask(method, API + path, token, body)

    async def chat(self, key: str, body: object = CHAT, **headers: str) -> httpx.Response:
        """Call the model with a key."""
        return await self.ask("POST", "/v1/chat/completions", key, body, headers)

    async def raw(self, *parts: bytes, pause: float = 0.01) -> bytes:
        """What the port answers to bytes."""
        host, port = self.gateway.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        answer = asyncio.ensure_future(reader.read(100_000))
        try:
            for part in parts:
                if not answer.done():
                    writer.write(part)
                    await asyncio.sleep(pause)
            return await asyncio.wait_for(answer, 120.0)
        finally:
            writer.close()

    async def truth(self) -> str:
        """Everything that an attack must not change. That its own attempt was refused something is noted there."""
        found: list[object] = [await list_tokens(self.store), await self.store.list_runs()]
        for run in ("run", "theirs"):
            page = await self.store.list_rollouts(run)
            found += [
                page,
                await self.store.steps(run),
                await self.store.metrics(run),
                await self.store.get_state(run, "x"),
            ]
            calls = [await self.store.transitions(rollout.id) for rollout in page.items if rollout.attempt]
            found += [[call for call in each if call.status is not CallStatus.REFUSED] for each in calls]
        found += [await list_resources(self.store), await self.store.get_state("", "gateway_secret")]
        return "\n".join(map(repr, found))


@asynccontextmanager
async def house_of(**settings: Any) -> AsyncIterator[House]:
    """A house; `settings` are those of the gateway."""
    store = MemoryStore()
    await store.open()
    await store.put_state("", "gateway_secret", SECRET.hex())
    for run, project in (("run", "default"), ("theirs", "theirs")):
        await store.put_run(Run(run, run, project=project))
        await store.create_rollouts([Rollout(f"{run}/{n}", run, Task("x"), "g") for n in range(2)])
        await put_resource(store, Resource("writer" if run == "run" else "project::theirs::planner", "text"))
    async with FakeVLLM() as fake:
        config = GatewayConfig(**settings)
        gateway = Gateway(store, [Upstream(fake.url, fake.model)], config, secret=SECRET, run="run", shared=True)
        control = Control(store, gateway, Config(gateway=config))
        await gateway.start()
        (lease,) = await store.lease("run", "default::w", limit=1, ttl=600.0)
        await store.lease("theirs", "theirs::w", limit=1, ttl=600.0)
        try:
            async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as client:
                house = House(store, gateway, fake, client, gateway.llm(lease))
                await _issue(house)
                yield house
        finally:
            await control.close()
            await gateway.close()
            await store.close()


async def _issue(house: House) -> None:
    """Everybody's tokens."""
    for name, scope, project, changes in (
        ("admin", Scope.ADMIN, "*", {}),
        ("own admin", Scope.ADMIN, "default", {}),
        ("trainer", Scope.TRAINER, "default", {}),
        ("runner", Scope.RUNNER, "default", {}),
        ("viewer", Scope.VIEWER, "default", {}),
        ("stranger", Scope.TRAINER, "theirs", {}),
        ("expired", Scope.TRAINER, "default", {"expires_at": time.time() - 1}),
        ("revoked", Scope.TRAINER, "default", {"revoked_at": 1.0}),
    ):
        token, house.tokens[name] = issue_token(scope, project, name)
        await put_token(house.store, replace(token, **changes))


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    """An open store with nothing in it."""
    made = MemoryStore()
    await made.open()
    yield made
    await made.close()


@pytest.fixture
async def patient_house() -> AsyncIterator[House]:
    """One that does not count wrong tokens."""
    async with house_of(limits=PortLimits(failures_per_minute=0)) as made:
        yield made


@pytest.fixture
async def house() -> AsyncIterator[House]:
    async with house_of(**TIGHT) as made:
        yield made
