"""Agents inside this process: tasks and threads, with their faults kept apart."""

from __future__ import annotations

import asyncio
import contextvars
import math
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx
import lightning
import openai
import pytest
from lightning.config import RunnerConfig
from lightning.errors import RunnerError
from lightning.instrument import current_attempt
from lightning.runner.inline import InlineRunner
from lightning.runner.protocol import Agent
from lightning.testing.chat_server import ChatServer
from lightning.types import LLM, Fault, Lease, StepReward, Task

NOWHERE = LLM("http://127.0.0.1:1/v1", "key", "policy")
Leases = Callable[..., Lease]


@asynccontextmanager
async def runner_of(agent: Agent, **settings: object) -> AsyncIterator[InlineRunner]:
    runner = InlineRunner(agent, RunnerConfig(**{"concurrency": 2, "timeout": 60, **settings}))  # type: ignore[arg-type]
    await runner.start()
    try:
        yield runner
    finally:
        await runner.close()


class Odd:
    """A number whose every word raises."""

    def __float__(self) -> float:
        sys.exit(5)

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def misbehave(task: Task, llm: LLM) -> object:
    match task.input:
        case "raise":
            raise LookupError("the agent's own error")
        case "sys.exit":
            sys.exit(4)
        case "interrupt":
            raise KeyboardInterrupt
        case "cancel":
            raise asyncio.CancelledError
        case "stop":
            raise StopIteration
        case "nan":
            return math.nan
        case "none":
            return None
        case "odd":
            return Odd()
        case "large":
            lightning.reward(1e39)
    return {"reward": 1, "speed": 0.5}


async def misbehave_async(task: Task, llm: LLM) -> object:
    await asyncio.sleep(0)
    return misbehave(task, llm)


@pytest.mark.parametrize("agent", [misbehave, misbehave_async])
@pytest.mark.parametrize("what", ["raise", "sys.exit", "interrupt", "cancel", "stop", "nan", "none", "odd", "large"])
async def test_whatever_an_agent_does_is_its_own_fault(agent: Agent, what: str, lease: Leases) -> None:
    async with runner_of(agent) as runner:
        bad, good = await asyncio.gather(runner.run(lease(what), NOWHERE), runner.run(lease("fine"), NOWHERE))
    assert (bad.reward, bad.fault) == (None, Fault.AGENT)
    assert bad.error
    assert (good.reward, good.rewards) == (1.0, {"reward": 1.0, "speed": 0.5})


async def test_a_timeout_cancels_an_async_agent(lease: Leases) -> None:
    ended = []

    async def agent(task: Task, llm: LLM) -> float:
        lightning.reward(0.5)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)
        return 1.0

    async with runner_of(agent, timeout=0.05) as runner:
        outcome = await runner.run(lease(), NOWHERE)
    assert outcome.fault is Fault.TIMEOUT
    assert [step.value for step in outcome.step_rewards] == [0.5]
    assert ended == [True]


async def test_a_timeout_leaves_a_sync_agent_behind_and_frees_its_place(lease: Leases) -> None:
    release = threading.Event()

    def agent(task: Task, llm: LLM) -> float:
        if task.input == "hang":
            release.wait(30)
        return 1.0

    async with runner_of(agent, timeout=0.2, concurrency=1) as runner:
        try:
            assert (await runner.run(lease("hang"), NOWHERE)).fault is Fault.TIMEOUT
            assert (await runner.run(lease("fine"), NOWHERE)).reward == 1.0
        finally:
            release.set()


async def test_cancelling_ends_an_async_agent(lease: Leases) -> None:
    began, ended = asyncio.Event(), []

    async def agent(task: Task, llm: LLM) -> float:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(current_attempt() is not None)
        return 1.0

    async with runner_of(agent) as runner:
        running = asyncio.create_task(runner.run(lease(), NOWHERE))
        await began.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert ended == [True]
    assert current_attempt() is None


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_eight_rollouts_at_once_are_told_apart(kind: str, lease: Leases, server: ChatServer) -> None:
    @lightning.component("solver")
    def sync_agent(task: Task, llm: LLM) -> float:
        with openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
            for turn in range(2):
                messages = [{"role": "user", "content": f"{task.input} {turn}"}]
                client.chat.completions.create(model=llm.model, messages=messages)  # type: ignore[call-overload]
                lightning.reward(float(str(task.input)))
        return float(str(task.input))

    @lightning.component("solver")
    async def async_agent(task: Task, llm: LLM) -> float:
        async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
            for turn in range(2):
                messages = [{"role": "user", "content": f"{task.input} {turn}"}]
                await client.chat.completions.create(model=llm.model, messages=messages)  # type: ignore[call-overload]
                lightning.reward(float(str(task.input)))
        return float(str(task.input))

    async with runner_of(sync_agent if kind == "sync" else async_agent, concurrency=8) as runner:
        found = await asyncio.gather(*(runner.run(lease(number), server.llm(f"key-{number}")) for number in range(8)))
    for number, outcome in enumerate(found):
        assert outcome.reward == number, outcome.error
        assert [step.value for step in outcome.step_rewards] == [number] * 2
    assert len(server.calls) == 16
    for call in server.calls:
        assert call.rollout == call.key == f"key-{call.text.split()[0]}"
        assert call.caller == lightning.Caller("solver", ("solver",), framework="raw")


async def test_frames_name_the_agent_but_not_who_runs_it(lease: Leases, server: ChatServer) -> None:
    def ask(llm: LLM) -> float:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        return float(httpx.post(f"{llm.base_url}/chat/completions", json=body).status_code == 200)

    async def my_agent(task: Task, llm: LLM) -> float:
        return ask(llm)

    async with runner_of(my_agent) as runner:
        assert (await runner.run(lease(), server.llm())).reward == 1.0
    assert server.calls[0].caller == lightning.Caller("ask", ("my_agent", "ask"), framework="raw")


async def test_a_sync_agent_sees_the_context_it_was_run_in(lease: Leases) -> None:
    variable: contextvars.ContextVar[float] = contextvars.ContextVar("variable")
    variable.set(0.75)
    async with runner_of(lambda task, llm: variable.get()) as runner:
        assert (await runner.run(lease(), NOWHERE)).reward == 0.75


async def test_closing_removes_the_tap() -> None:
    before = httpx.Client.send
    async with runner_of(misbehave) as runner:
        await runner.start()
        assert httpx.Client.send is not before
    assert httpx.Client.send is before


async def test_it_must_be_started_with_an_agent(lease: Leases) -> None:
    with pytest.raises(RunnerError, match="has not been started"):
        await InlineRunner(misbehave, RunnerConfig()).run(lease(), NOWHERE)
    with pytest.raises(RunnerError, match="cannot be called"):
        InlineRunner(None, RunnerConfig())  # type: ignore[arg-type]


async def test_a_reward_that_was_smuggled_in_costs_only_its_rollout(lease: Leases) -> None:
    def agent(task: Task, llm: LLM) -> float:
        session = current_attempt()
        assert session is not None
        if task.input == "smuggle":
            session._step_rewards.append(StepReward(math.nan))
        return 1.0

    async with runner_of(agent) as runner:
        bad, good = await asyncio.gather(runner.run(lease("smuggle"), NOWHERE), runner.run(lease("fine"), NOWHERE))
    assert (bad.reward, bad.fault, good.reward) == (None, Fault.AGENT, 1.0)
    assert "a step reward is nan" in bad.error
