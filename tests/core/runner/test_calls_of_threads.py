"""Whatever runs an agent, its own thread or task sees the calls of the threads that it started, with a context or without."""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import lightning
import pytest
from lightning.config import RunnerConfig
from lightning.instrument import current_attempt
from lightning.runner.inline import InlineRunner
from lightning.runner.worker import run_agent
from lightning.types import LLM, Lease, Outcome, Task

LLM_ = LLM("http://127.0.0.1:1/v1", "key", "policy")
Started = Callable[[Callable[[], None]], None]


def answered(response_id: str) -> None:
    """A call has been answered here, as the tap says it."""
    session = current_attempt()
    assert session is not None
    session.calls.add(response_id, "agent")


def step(response_id: str) -> None:
    """A reward and a tool run that are to name this call."""
    lightning.reward(1.0, response_id)
    lightning.tool(name=response_id)(lambda: None)()


def plain(work: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


def with_context(work: Callable[[], None]) -> None:
    plain(functools.partial(contextvars.copy_context().run, work))


def sync_agent(started: Started, task: Task, llm: LLM) -> float:
    answered("plan")
    step("plan")
    started(lambda: answered("draft"))
    step("draft")
    answered("review")
    step("review")
    return 1.0


async def async_agent(started: Started, task: Task, llm: LLM) -> float:
    answered("plan")
    step("plan")
    started(lambda: answered("draft"))
    step("draft")
    await asyncio.get_running_loop().run_in_executor(None, answered, "second draft")
    step("second draft")
    await asyncio.to_thread(answered, "review")
    step("review")
    return 1.0


def agent_with_a_coroutine(started: Started, task: Task, llm: LLM) -> Awaitable[float]:
    started(lambda: answered("outline"))
    step("outline")
    return async_agent(started, task, llm)


def in_worker(agent: Callable[..., object], lease: Lease) -> Outcome:
    with asyncio.Runner() as loop:
        return run_agent(agent, lease.rollout.task, LLM_, loop)  # type: ignore[arg-type]


def inline(agent: Callable[..., object], lease: Lease) -> Outcome:
    async def run() -> Outcome:
        runner = InlineRunner(agent, RunnerConfig(timeout=60))  # type: ignore[arg-type]
        await runner.start()
        try:
            return await runner.run(lease, LLM_)
        finally:
            await runner.close()

    return asyncio.run(run())


@pytest.mark.parametrize("run", [in_worker, inline])
@pytest.mark.parametrize("agent", [sync_agent, async_agent, agent_with_a_coroutine])
@pytest.mark.parametrize("started", [plain, with_context])
def test_each_reward_and_tool_run_names_the_call_before_it(
    run: Callable[[Callable[..., object], Lease], Outcome],
    agent: Callable[..., object],
    started: Started,
    lease: Callable[..., Lease],
) -> None:
    bound = functools.partial(agent, started)
    outcome = run(bound, lease())
    assert outcome.reward == 1.0, outcome
    assert len(outcome.step_rewards) == len(outcome.tool_events) >= 3
    assert [given.response_id for given in outcome.step_rewards] == [given.name for given in outcome.step_rewards]
    assert [event.response_id for event in outcome.tool_events] == [event.name for event in outcome.tool_events]
