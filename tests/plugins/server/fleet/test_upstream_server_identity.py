"""A server that answers where a policy server was: it is known for another one, and what it says is never the policy's."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from lightning.config.sections import GatewayConfig
from lightning.gateway import Gateway, Upstream
from lightning.gateway.identity import gateway_secret
from lightning.gateway.upstream import Found, Pool
from lightning.store.memory import MemoryStore
from lightning.testing.fake_vllm import FakeVLLM, Reply
from lightning.types import LLM, UNSERVED, CallStatus, Rollout, Run, Task, Transition
from lightning_server.fleet.owner import Owner

HI = {"messages": [{"role": "user", "content": "hi there"}]}


@dataclass
class Site:
    """A server that knows a run's policy server from the store, and an agent of the run."""

    store: MemoryStore
    gateway: Gateway
    llm: LLM

    async def ask(self, path: str = "chat/completions", **asked: object) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.llm.api_key}"}
        async with httpx.AsyncClient(timeout=30) as http:
            return await http.post(f"{self.llm.base_url}/{path}", json={**HI, **asked}, headers=headers)

    async def calls(self) -> list[Transition]:
        return await self.store.transitions("run/0")

    @property
    def pool(self) -> Pool:
        return self.gateway._policies.of("run").pool

    def be_hasty(self) -> None:
        """From now on a call waits for a tenth of a second when there is no policy server."""
        self.pool.grace = 0.1

    async def until(self, condition: object) -> None:
        async with asyncio.timeout(30):
            while not condition():  # type: ignore[operator]
                await asyncio.sleep(0.005)


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    store = MemoryStore()
    await store.open()
    await store.put_run(Run("run", "run"))
    await store.create_rollouts([Rollout("run/0", "run", Task("q"), "g")])
    (lease,) = await store.lease("run", "worker")
    gateway = Gateway(store, [], GatewayConfig(), secret=await gateway_secret(store), shared=True)
    await gateway.start()
    yield Site(store, gateway, gateway.llm(lease))
    await gateway.close()
    await store.close()


@asynccontextmanager
async def in_place_of(dead: FakeVLLM, *aliases: str) -> AsyncIterator[FakeVLLM]:
    await dead.close()
    async with FakeVLLM(port=dead.port, aliases=aliases) as other:
        yield other


async def test_a_vllm_at_a_dead_trainers_address_is_not_taken_for_its_policy(site, caplog):
    """The trainer is killed, vLLM with it, and another run's gets the port before any health check could notice."""
    async with FakeVLLM(aliases=("tiny-one",)) as fake:
        await Owner(site.store, "run").open([Upstream(fake.url, "tiny-one")], 7)
        assert (await site.ask()).status_code == 200
        assert fake.requests[0].body["model"] == "tiny-one"
        site.be_hasty()
        async with in_place_of(fake, "tiny-two") as other:
            answers = [await site.ask(), await site.ask("messages/count_tokens", max_tokens=1)]
            assert [answer.status_code for answer in answers] == [503, 503]
            assert not site.pool.healthy
            served, failed = await site.calls()
            assert (served.status, served.version) == (CallStatus.OK, 7)
            assert (failed.status, failed.finish_reason, len(failed.response_ids)) == (CallStatus.ERROR, UNSERVED, 0)
            (said,) = [record.message for record in caplog.records if "another server answers" in record.message]
            assert "it serves tiny, tiny-two and not tiny-one" in said
            assert fake.url in said
            await Owner(site.store, "run").open([Upstream(other.url, "tiny-two")], 9)  # its own trainer, say
            await site.until(lambda: site.pool.slots[0].upstream.model == "tiny-two" and site.pool.healthy)
            assert (await site.ask()).status_code == 200
    assert [call.version for call in await site.calls()][-1] == 9


async def test_what_is_no_vllm_at_all_is_not_taken_for_one(site):
    async with FakeVLLM(aliases=("tiny-one",)) as fake:
        await Owner(site.store, "run").open([Upstream(fake.url, "tiny-one")], 7)
        await site.ask()
        await fake.close()
        app = aiohttp.web.Application()
        app.router.add_get("/health", _fine)
        runner = aiohttp.web.AppRunner(app)
        await runner.setup()
        await aiohttp.web.TCPSite(runner, "127.0.0.1", fake.port).start()
        site.be_hasty()
        assert (await site.ask()).status_code == 503
        assert "it serves no model" in site.pool.slots[0].other
        await runner.cleanup()


async def _fine(request: aiohttp.web.Request) -> aiohttp.web.Response:
    return aiohttp.web.Response()


async def test_the_same_server_may_come_back(site):
    """A connection that breaks for a moment is no other server."""
    async with FakeVLLM(aliases=("tiny-one",)) as fake:
        await Owner(site.store, "run").open([Upstream(fake.url, "tiny-one")], 7)
        await site.ask()
        site.pool.check_every = 0.02
        await fake.close()
        asking = asyncio.create_task(site.ask())
        await site.until(lambda: not site.pool.healthy)
        await fake.start()
        assert (await asking).status_code == 200
    assert [call.status for call in await site.calls()] == [CallStatus.OK] * 2


@pytest.mark.parametrize("claim", ["theirs", ""])
async def test_an_attached_vllm_that_is_somebody_elses_now_gets_no_calls(site, caplog, claim):
    """Another trainer has attached to it, or it was started again: what is in flight may be of other weights already."""
    async with FakeVLLM(claim="ours") as fake:
        fake.pause()
        await Owner(site.store, "run").open([Upstream(fake.url, "tiny", "ours")], 7)
        asking = asyncio.create_task(site.ask())
        await site.until(lambda: fake.requests and site.pool.slots[0].asked)
        site.pool.check_every = 0.02
        fake.claim = claim
        site.pool._assigned.set()  # look now
        await site.until(lambda: site.pool.slots[0].other)
        fake.resume()
        assert (await asking).status_code == 200
        site.be_hasty()
        assert (await site.ask()).status_code == 503
        assert len(fake.requests) == 1
        assert [(call.status, call.finish_reason) for call in await site.calls()] == [
            (CallStatus.ERROR, "stop"),
            (CallStatus.ERROR, UNSERVED),
        ]
        assert caplog.text.count("it was started again, or another trainer has attached to it") == 1
        fake.claim = "ours"
        site.pool._assigned.set()
        await site.until(lambda: site.pool.healthy)


async def test_a_404_of_the_policy_server_itself_is_the_agents(site):
    async with FakeVLLM() as fake:
        await Owner(site.store, "run").open([Upstream(fake.url, "tiny")], 7)
        fake.queue(Reply(status=404, message="no such image"))
        answer = await site.ask()
        assert (answer.status_code, "no such image" in answer.text) == (404, True)
        assert site.pool.healthy
        assert (await site.ask()).status_code == 200


async def test_an_outage_is_said_once_and_its_end_too(site, caplog):
    async with FakeVLLM() as fake:
        await Owner(site.store, "run").open([Upstream(fake.url, "tiny")], 7)
        await site.ask()
        site.be_hasty()
        site.pool.check_every = 0.02
        for _ in range(2):
            caplog.clear()
            await fake.close()
            with caplog.at_level(logging.WARNING):
                answers = await asyncio.gather(*(site.ask() for _ in range(5)))
                answers.append(await site.ask())
                assert {answer.status_code for answer in answers} == {503}
                assert caplog.text.count("no policy server was healthy for 0.1 s") == 1
                await fake.start()
                await site.until(lambda: site.pool.healthy)
            assert caplog.text.count("a policy server is healthy again after") == 1
            assert (await site.ask()).status_code == 200


@asynccontextmanager
async def slow(monkeypatch: pytest.MonkeyPatch, *hanging: str) -> AsyncIterator[tuple[Pool, aiohttp.ClientSession]]:
    """A pool with one attached server, some routes of which never answer; whoever asks waits a tenth of a second."""
    patience = aiohttp.ClientTimeout(total=0.1)
    monkeypatch.setattr("lightning.gateway.upstream.CHECK_TIMEOUT", patience)

    async def answer(request: web.Request) -> web.Response:
        if request.path in hanging:
            await asyncio.sleep(5)
        return web.json_response({"data": [{"id": "policy"}], "results": [{"claim": "mine"}]})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        yield Pool([Upstream(str(server.make_url("")), "policy", "mine")]), session


async def test_a_server_that_is_too_busy_to_show_itself_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM says no word while it loads weights, which takes as long as they are large."""
    async with slow(monkeypatch, "/collective_rpc") as (pool, session):
        for _ in range(4):
            assert await pool.check(pool.slots[0], session) is Found.LATE
        assert (pool.slots[0].healthy, pool.slots[0].misses) == (True, 0)


async def test_calls_that_fail_together_are_one_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    async with slow(monkeypatch, "/health") as (pool, session):
        slot = pool.slots[0]
        await asyncio.gather(*(pool.check(slot, session) for _ in range(5)))
        assert (slot.healthy, slot.misses) == (True, 1)
        assert await pool.check(slot, session) is Found.LATE
        assert await pool.check(slot, session) is Found.OUT
        assert not slot.healthy
