"""Training whose agents run in clients: the trainer hears of everything, and says when nobody works for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from lightning.config import Config, with_settings
from lightning.gateway.stages import NO_LINE
from lightning.hooks import hookimpl
from lightning.plugins import plugins
from lightning.store.memory import MemoryStore
from lightning.types import LLM, Fault, Lease, Outcome, Rollout, Run, Scope, Status, Task
from lightning_server import client_agents
from lightning_server.auth import issue_token
from lightning_server.client import Client
from lightning_server.client_agents import ClientAgents
from lightning_server.control import Control
from lightning_server.remote_runner import RemoteRunner
from lightning_server.tokens import put_token
from lightning_session.session import Session


@pytest.fixture
def finished() -> Iterator[list[str]]:
    """The ids of rollouts that the hook `rollout_finished` heard of."""
    heard: list[str] = []

    class Listener:
        @hookimpl
        def rollout_finished(self, rollout: Rollout) -> None:
            heard.append(rollout.id)

    assert plugins().hook.rollout_finished is not None, "loads the plugins"
    listener = Listener()
    plugins()._manager.register(listener)
    yield heard
    plugins()._manager.unregister(listener)


@asynccontextmanager
async def clients(made: Any, agent: Any, count: int = 2) -> AsyncIterator[None]:
    """Let clients instead of the bench's own runner work for its run."""
    stack = made.loop.stack
    token, plain = issue_token(Scope.RUNNER)
    await put_token(stack.store, token)
    control = Control(stack.store, stack.gateway)
    stop = asyncio.Event()
    config = with_settings(Config(), {"runner.concurrency": 4})
    working = [
        asyncio.create_task(Client(control.url, agent, token=plain, runner="inline", config=config).work(stop))
        for _ in range(count)
    ]
    try:
        yield
    finally:
        stop.set()
        await asyncio.gather(*working)
        await control.close()


@pytest.mark.parametrize("staleness", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside"])
async def test_clients_run_the_agents_of_a_training(
    staleness: int, beside: bool, tmp_path: Path, bench: Any, answering: Any, finished: list[str]
) -> None:
    async with bench(tmp_path / "run", trainer__max_staleness=staleness, runner__concurrency=2) as made:
        stack = made.loop.stack
        runner = stack.runner if beside else RemoteRunner()
        stack.agents = ClientAgents(
            stack.store, stack.run.id, runner, stack.config.runner, stack.llm, stack.gateway.parts.line
        )
        async with clients(made, answering):
            await made.loop.run({})
        rollouts = (await made.store.list_rollouts("run")).items
        assert len(await made.store.steps("run")) == 3
        assert len(made.policy.ledger) == 3
        ended = sorted(one.id for one in rollouts if one.status.ended)
        assert sorted(finished) == ended, "each is told once, wherever it ran"
        assert {one.status for one in rollouts} <= {Status.SUCCEEDED, Status.PENDING}


@pytest.fixture
async def store() -> AsyncIterator[MemoryStore]:
    store = MemoryStore()
    await store.open()
    await store.put_run(Run("run", "run"))
    yield store
    await store.close()


def llm_for(lease: Lease) -> LLM:
    raise AssertionError("nothing is leased in this process")


async def test_what_was_lost_on_its_last_attempt_ends_although_nobody_leases(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, finished: list[str]
) -> None:
    monkeypatch.setattr(client_agents, "LOOK_SECONDS", 0.05)
    rollout = Rollout("r", "run", Task(1), "g", max_attempts=1)
    await store.create_rollouts([rollout])
    await store.lease("run", "a client that is gone", ttl=0.1)
    agents = ClientAgents(store, "run", RemoteRunner(), Config().runner, llm_for, NO_LINE)
    agents.expect([rollout])
    told: list[Rollout] = []
    await agents.work(told.append)
    assert [(one.status, one.fault) for one in told] == [(Status.FAILED, Fault.INFRASTRUCTURE)]
    assert finished == ["r"]


async def test_what_a_loop_wants_no_more_is_ended_at_the_clients(
    tmp_path: Path, bench: Any, answering: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that never comes to an end holds up no group."""
    monkeypatch.setattr(client_agents, "SETTLE_SECONDS", 0.01)
    never = asyncio.Event()
    begun = 0

    async def agent(task: Task, llm: LLM) -> float:
        nonlocal begun
        begun += 1
        number = begun
        reward: float = await answering(task, llm)
        if number <= 2:
            await never.wait()
        return reward

    async with bench(tmp_path / "run", own_loop=True) as made, asyncio.timeout(60):
        stack = made.loop.stack
        stack.agents = ClientAgents(
            stack.store, stack.run.id, RemoteRunner(), stack.config.runner, stack.llm, stack.gateway.parts.line
        )
        async with clients(made, agent):
            async with Session(made.loop) as session:
                (group,) = await session.rollout([Task("one")], n=6, keep=3)
                assert 3 <= len(group.trajectories) <= 4
            found = (await made.store.list_rollouts("run")).items
            assert {one.fault for one in found if one.reward is None} == {Fault.CANCELLED}
            never.set()


async def test_what_ends_while_other_rollouts_are_created_is_told(store: MemoryStore, finished: list[str]) -> None:
    mine = Rollout("mine", "run", Task(1), "g", max_attempts=1)
    known = [Rollout(name, "run", Task(1), "g", index=1, max_attempts=1) for name in ("ended", "open")]
    await store.create_rollouts([mine, *known])
    agents = ClientAgents(store, "run", RemoteRunner(), Config().runner, llm_for, NO_LINE)
    agents.expect([mine])
    for lease in await store.lease("run", "client", limit=3):
        if lease.rollout.id != "open":
            await store.complete(lease.rollout.id, lease.attempt, Outcome(reward=1.0))
    agents.expect(known)
    await agents.forget_ended(known)
    await agents.look()
    assert finished == ["mine"]


async def test_it_is_said_when_nobody_takes_the_work(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client_agents, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(client_agents, "SILENCE_SECONDS", 0.1)
    rollout = Rollout("r", "run", Task(1), "g")
    await store.create_rollouts([rollout])
    agents = ClientAgents(store, "run", RemoteRunner(), Config().runner, llm_for, NO_LINE)
    agents.how_to_join = "lightning runner --server http://here MODULE:AGENT"
    agents.expect([rollout])
    waiting = asyncio.create_task(agents.work(lambda rollout: None))
    try:
        async with asyncio.timeout(60):
            while "lightning runner --server http://here" not in caplog.text:
                await asyncio.sleep(0.02)
    finally:
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
    assert "1 rollout of run run waits" in caplog.text
