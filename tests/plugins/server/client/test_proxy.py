"""A proxy before the servers that answers in their place, hangs up, or asks them in turn: the client waits, and its agents go
on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import cast

import pytest
from aiohttp import ClientSession, web
from lightning.errors import StoreError, UnavailableError
from lightning.instrument import emit
from lightning.types import LLM, Fault, Rollout, Status, Task, ToolEvent
from lightning_server.client import Client
from lightning_server.client import run_discovery as finding
from lightning_server.client.server_presence import Servers

from tests.plugins.server.client.conftest import RUN, Server, Site, calling
from tests.servers.ports import free_port

HOP = ("host", "content-length", "transfer-encoding", "connection", "content-encoding")


@dataclass
class Proxy:
    """Passes requests of one kind on to its servers in turn. Answers each with `page` where there is one; hangs up at bodies of
    `longest` bytes."""

    to: list[str]
    page: tuple[int, str] | None = None
    longest: int = 2**30
    url: str = ""
    turned_away: list[str] = field(default_factory=list)
    passed_on: list[str] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if self.page is not None:
            self.turned_away.append(f"{request.method} {request.path.rpartition('/')[2]}")
            return web.Response(status=self.page[0], text=self.page[1], content_type="text/html")
        if (request.content_length or 0) >= self.longest:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        sent = {name: value for name, value in request.headers.items() if name.lower() not in HOP}
        self.passed_on.append(request.path.rpartition("/")[2])
        to = self.to[self.passed_on.count(self.passed_on[-1]) % len(self.to)]
        target, data = f"{to}{request.raw_path}", await request.read()
        async with (
            ClientSession() as session,
            session.request(request.method, target, data=data, headers=sent) as reply,
        ):
            kept = {name: value for name, value in reply.headers.items() if name.lower() not in HOP}
            return web.Response(status=reply.status, body=await reply.read(), headers=kept)


@pytest.fixture
async def proxy(site: Site, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Proxy]:
    """One before a server of the site. Everything is asked often."""
    monkeypatch.setattr(finding, "FIND_SECONDS", 0.05)
    monkeypatch.setattr(finding, "AWAY_SECONDS", 0.05)
    monkeypatch.setattr("lightning.runner.lease_loop.LOOK_SECONDS", 0.05)
    server: Server = await site.start()
    proxy = Proxy([server.url])
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", proxy.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    proxy.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield proxy
    await runner.cleanup()


def client_of(site: Site, proxy: Proxy, agent: object = calling, **settings: object) -> Client:
    client = site.client(cast("Server", proxy), agent=agent, **settings)
    client._store._patience = 0.05
    return client


@pytest.mark.parametrize(
    ("page", "runs"),
    [
        ((200, "<html>Back soon</html>"), ()),
        ((403, "<html>Forbidden</html>"), ()),
        ((502, "<html>Bad gateway</html>"), ()),
        ((404, "<html>No backend</html>"), (RUN,)),
    ],
    ids=str,
)
async def test_a_page_in_the_place_of_every_answer_ends_nothing(
    site: Site, proxy: Proxy, page: tuple[int, str], runs: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    async def agent(task: Task, llm: LLM) -> float:
        if task.input == 0:
            proxy.page = page
            while "POST leases" not in proxy.turned_away or len(proxy.turned_away) < 10:
                await asyncio.sleep(0.02)
            proxy.page = None
        return await calling(task, llm)

    await site.begin(count=1)
    working = asyncio.create_task(client_of(site, proxy, agent, runs=runs, rollouts=2).work())
    while (await site.rollouts())[f"{RUN}/0"].status is not Status.SUCCEEDED:
        assert not working.done(), await working
        await asyncio.sleep(0.02)
    await site.store.create_rollouts([Rollout("late", RUN, Task(7), "group")])
    tally = await asyncio.wait_for(working, 30)
    assert (tally.leased, tally.succeeded) == (2, 2)
    said = [record.getMessage() for record in caplog.records if "Agents that run go on" in record.getMessage()]
    assert len(said) == 1
    assert f"{proxy.url} answered {page[0]}" in said[0]
    assert "not as a Lightning Server does: look at the proxy before it" in said[0]


async def test_a_page_at_the_first_contact_is_an_error_at_once(site: Site, proxy: Proxy) -> None:
    proxy.page = (404, "<html>No such site</html>")
    with pytest.raises(StoreError, match=r"answered 404 .*Give the URL") as error:
        await asyncio.wait_for(client_of(site, proxy).work(), 10)
    assert not isinstance(error.value, UnavailableError)


async def test_an_outcome_at_which_a_proxy_hangs_up_is_told_with_less_in_it(
    site: Site, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    async def agent(task: Task, llm: LLM) -> float:
        for _ in range(40):
            emit(ToolEvent("search", "ok", arguments="x" * 4000, output="found"))
        return await calling(task, llm)

    proxy.longest = 100_000
    await site.begin(count=1)
    tally = await asyncio.wait_for(client_of(site, proxy, agent, rollouts=1).work(), 30)
    assert (tally.succeeded, tally.lost) == (1, 0)
    events = list((await site.store.attempts_of([(f"{RUN}/0", None)]))[0].tool_events)
    assert [(event.arguments, event.output) for event in events] == [(None, "found")] * 40
    assert "less of it is told now" in caplog.text
    assert "hung up 4 times" in caplog.text


async def test_servers_that_take_turns_are_not_asked_for_news_without_end(
    site: Site, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.to.append((await site.start()).url)
    monkeypatch.setattr("lightning.runner.lease_loop.LOOK_SECONDS", 300.0)

    async def agent(task: Task, llm: LLM) -> float:
        await asyncio.sleep(0.5)
        return await calling(task, llm)

    await site.begin(count=1)
    await asyncio.wait_for(client_of(site, proxy, agent, runs=(RUN,), rollouts=1).work(), 30)
    assert proxy.passed_on.count("watch") <= 4
    assert proxy.passed_on.count("leases") <= 5


async def test_news_is_heard_from_servers_that_take_turns(
    site: Site, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.to.append((await site.start()).url)
    monkeypatch.setattr("lightning.runner.lease_loop.LOOK_SECONDS", 300.0)
    for name in ("FIRST_PAUSE", "LONGEST_PAUSE"):
        monkeypatch.setattr(f"lightning_server.http_store.store.{name}", 0.02)
    await site.begin(count=1)
    working = asyncio.create_task(client_of(site, proxy, runs=(RUN,), rollouts=2).work())
    while (await site.rollouts())[f"{RUN}/0"].status is not Status.SUCCEEDED:
        await asyncio.sleep(0.02)
    await site.store.create_rollouts([Rollout("late", RUN, Task(7), "group")])
    assert (await asyncio.wait_for(working, 30)).succeeded == 2


@pytest.mark.parametrize("gone", [False, True])
async def test_an_agent_is_at_fault_whichever_of_the_servers_behind_one_url_answers(
    site: Site, proxy: Proxy, gone: bool
) -> None:
    proxy.to += [(await site.start()).url for _ in range(2)]

    async def agent(task: Task, llm: LLM) -> float:
        if gone:
            proxy.to[:] = [(await site.start()).url]
        raise ValueError("a bug of the agent's")

    await site.begin(count=4, max_attempts=1)
    await asyncio.wait_for(client_of(site, proxy, agent, rollouts=4, runner__concurrency=1).work(), 30)
    faults = [one.fault for one in (await site.rollouts()).values()]
    assert faults == [Fault.INFRASTRUCTURE if gone else Fault.AGENT] * 4


async def test_an_agent_is_at_fault_when_it_is_not_known_which_server_it_used(
    site: Site, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unknown(*_: object) -> str:
        return ""

    async def agent(task: Task, llm: LLM) -> float:
        raise ValueError("a bug of the agent's")

    monkeypatch.setattr("lightning_server.client.server_presence.Servers.process_at", unknown)
    await site.begin(count=1, max_attempts=1)
    await asyncio.wait_for(client_of(site, proxy, agent, rollouts=1).work(), 30)
    assert [one.fault for one in (await site.rollouts()).values()] == [Fault.AGENT]


async def test_a_server_that_nobody_knows_by_its_word_is_gone_when_nothing_answers() -> None:
    """It died between the lease and the question which process it is, say."""
    servers = Servers()
    assert await servers.is_gone(f"http://127.0.0.1:{free_port()}", "")
    await servers.close()
