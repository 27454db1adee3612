"""Agents in actors of a real Ray on this machine: outcomes as from the process runner, and actors that are replaced."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest
from lightning.config.plugin_settings import RunnerConfig
from lightning.errors import RunnerError
from lightning.runner.protocol import Agent
from lightning.testing.chat_server import ChatServer
from lightning.types import LLM, Fault, Lease, Task
from lightning_ray.cluster import RayCluster
from lightning_ray.config import RayConfig
from lightning_ray.runner import RayRunner

pytestmark = [
    pytest.mark.slow,
    # Ray lets go of its servers' objects before these have ended, also those of a Ray that an earlier module began.
    pytest.mark.filterwarnings(r"ignore:subprocess \d+ is still running:ResourceWarning"),
]

Leases = Callable[..., Lease]
NOWHERE = LLM("http://127.0.0.1:1/v1", "key", "policy")


def make_agent() -> Agent:
    """A local function travels by value: the nodes need not have this module."""

    def agent(task: Task, llm: LLM) -> Any:
        match task.input:
            case "raise":
                raise LookupError("the agent's own error")
            case "hang":
                time.sleep(600)
            case "exit":
                os._exit(3)
            case "pid":
                return float(os.getpid())
            case "environment":
                return float(os.environ["OPENAI_API_KEY"] == llm.api_key and "ray" not in sys.modules)
            case "kill the actor":
                fork_server = psutil.Process().parent()
                assert fork_server is not None
                fork_server.parent().kill()  # type: ignore[union-attr]
                time.sleep(600)
            case "call":
                import httpx

                body = {"model": llm.model, "messages": [{"role": "user", "content": "hello"}]}
                reply = httpx.post(f"{llm.base_url}/chat/completions", json=body)
                return float(reply.status_code == 200)
        return 1.0

    return agent


def config_of(**settings: Any) -> RunnerConfig:
    ray = RayConfig(**{"num_cpus": 0.5, **settings.pop("ray", {})})
    return RunnerConfig(**{"concurrency": 1, "timeout": 60.0, "adapters": (), **settings}, ray=ray)


@asynccontextmanager
async def runner_of(**settings: Any) -> AsyncIterator[RayRunner]:
    runner = RayRunner(make_agent(), config_of(**settings))
    await runner.start()
    try:
        yield runner
    finally:
        await runner.close()


async def test_agents_in_an_actor(ray: Any, lease: Leases, server: ChatServer, gone: Callable[[int], bool]) -> None:
    async with runner_of(concurrency=2, timeout=5.0, ray={"agents_per_actor": 2}) as runner:
        # whatever an agent does is an outcome, and costs nobody else
        slow = asyncio.create_task(runner.run(lease("hang"), NOWHERE))
        for what, fault, says in [
            ("raise", Fault.AGENT, "LookupError: the agent's own error"),
            ("exit", Fault.INFRASTRUCTURE, "exited with code 3"),
        ]:
            outcome = await runner.run(lease(what), NOWHERE)
            assert (outcome.fault, outcome.reward) == (fault, None), what
            assert says in outcome.error
        assert (await runner.run(lease("environment"), NOWHERE)).reward == 1.0
        assert (await runner.run(lease("call"), server.llm())).reward == 1.0
        late = await slow
        assert (late.fault, "runner.timeout" in late.error) == (Fault.TIMEOUT, True)

        # one that is cancelled is killed, and its place used again
        pid = (await runner.run(lease("pid"), NOWHERE)).reward
        assert pid is not None
        running = [asyncio.create_task(runner.run(lease("hang"), NOWHERE)) for _ in range(2)]
        await asyncio.sleep(0.5)
        for task in running:
            task.cancel()
        assert await asyncio.gather(*running, return_exceptions=True) != [None, None]
        assert all(task.cancelled() for task in running)
        after = await asyncio.gather(*(runner.run(lease("pid"), NOWHERE) for _ in range(2)))
        assert all(outcome.reward not in (None, pid) for outcome in after)
        assert gone(int(pid))


async def test_an_actor_that_dies_costs_an_attempt_and_is_replaced(
    ray: Any, lease: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with runner_of() as runner:
        lost = await runner.run(lease("kill the actor"), NOWHERE)
        assert lost.fault is Fault.INFRASTRUCTURE
        assert "the actor that ran the agent was lost" in lost.error
        assert (await runner.run(lease("fine"), NOWHERE)).reward == 1.0

        # what is on other machines would call itself
        monkeypatch.setattr(RayCluster, "spans_machines", lambda self: True)
        await runner.run(lease("kill the actor"), LLM("http://gateway.example/v1", "key", "policy"))
        assert (await runner.run(lease("fine"), LLM("http://gateway.example/v1", "key", "policy"))).reward == 1.0
        with pytest.raises(RunnerError, match=r"cannot reach the model at http://127.0.0.1:1/v1: set gateway.host"):
            await runner.run(lease("fine"), NOWHERE)


async def test_what_cannot_run_says_why(ray: Any) -> None:
    async with asyncio.timeout(60):
        with pytest.raises(RunnerError, match=r"no agent can be run in the Ray cluster.*preloading module 'no_such'"):
            async with runner_of(preload=("no_such",)):
                pass
        with pytest.raises(RunnerError, match=r"Ray has had no room for an actor for 1 s.*\{'tpu': 1.0\}"):
            async with runner_of(ray={"resources": {"tpu": 1.0}, "start_timeout": 1.0}):
                pass
        with pytest.raises(RunnerError, match="Ray refused to make an actor"):
            async with runner_of(ray={"runtime_env": {"working_dir": 3}}):
                pass
