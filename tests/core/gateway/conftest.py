"""A gateway between a fake vLLM and a memory store, and an agent's key for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import httpx
import openai
import pytest
from lightning.config.plugin_settings import GatewayConfig
from lightning.gateway import Gateway, Upstream
from lightning.store.memory import MemoryStore
from lightning.testing.fake_vllm import FakeVLLM
from lightning.types import LLM, Lease, Rollout, Run, Task, Transition

SECRET = b"a secret of the test, long enough"


@dataclass
class House:
    """Everything one test needs, opened together."""

    store: MemoryStore
    fake: FakeVLLM
    gateway: Gateway
    stack: AsyncExitStack
    leases: list[Lease] = field(default_factory=list)

    async def lease(self) -> Lease:
        number = len(self.leases)
        rollout = Rollout(id=f"rollout-{number}", run="run", task=Task(input=number), group="g")
        await self.store.create_rollouts([rollout])
        (lease,) = await self.store.lease("run", "worker")
        self.leases.append(lease)
        return lease

    async def llm(self, **kwargs: object) -> LLM:
        return self.gateway.llm(await self.lease(), **kwargs)

    async def client(self, llm: LLM | None = None, **kwargs: object) -> openai.AsyncOpenAI:
        llm = llm or await self.llm()
        made = openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key, max_retries=0, **kwargs)
        return await self.stack.enter_async_context(made)

    async def http(self, llm: LLM | None = None) -> httpx.AsyncClient:
        llm = llm or await self.llm()
        headers = {"authorization": f"Bearer {llm.api_key}"}
        made = httpx.AsyncClient(base_url=llm.base_url, headers=headers, timeout=20)
        return await self.stack.enter_async_context(made)

    async def transitions(self, number: int = 0) -> list[Transition]:
        return await self.store.transitions(self.leases[number].rollout.id)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.005)

    async def recorded(self, count: int = 1) -> list[Transition]:
        """The first rollout's transitions, once there are `count`."""
        async with asyncio.timeout(60):
            while len(found := await self.transitions()) < count:
                await asyncio.sleep(0.01)
        return found


@pytest.fixture
async def build() -> AsyncIterator[Callable[..., object]]:
    """Open a house: `await build(store=..., upstreams=[...], hold_timeout=...)`."""
    async with AsyncExitStack() as stack:

        async def make(store=None, upstreams=None, version=0, **settings) -> House:
            store = store or MemoryStore()
            await store.open()
            stack.push_async_callback(store.close)
            await store.put_run(Run("run", "run"))
            fake = await stack.enter_async_context(FakeVLLM())
            served = [Upstream(fake.url, fake.model)] if upstreams is None else upstreams
            gateway = Gateway(store, served, GatewayConfig(**settings), secret=SECRET, version=version)
            await gateway.start()
            stack.push_async_callback(gateway.close)
            inner = await stack.enter_async_context(AsyncExitStack())
            return House(store, fake, gateway, inner)

        yield make


@pytest.fixture
async def house(build) -> House:
    return await build()
