"""Worker processes, the real gateway, a scripted policy server and a store, together."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable

import aiohttp
import lightning
import openai
import pytest
from lightning.config import GatewayConfig, RunnerConfig
from lightning.gateway import Gateway, Upstream
from lightning.runner.lease_loop import work
from lightning.runner.process import ProcessRunner
from lightning.store.memory import MemoryStore
from lightning.testing.fake_vllm import FakeVLLM
from lightning.types import LLM, Caller, CallStatus, Rollout, Run, Status, Task

RUN = "run-1"


async def agent(task: Task, llm: LLM) -> float:
    """Two named calls and a tool between them; the second call is streamed."""

    @lightning.tool
    def look_up(text: str) -> str:
        if task.input == 3:
            raise LookupError(text)
        return text

    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key, max_retries=0) as client:
        messages = [{"role": "user", "content": f"task {task.input}"}]
        with lightning.component("writer"):
            await client.chat.completions.create(model=llm.model, messages=messages)  # type: ignore[call-overload]
            try:
                look_up("x")
            except LookupError:
                lightning.reward(-1.0, "tool")
        with lightning.component("checker"):
            stream = await client.chat.completions.create(model=llm.model, messages=messages, stream=True)  # type: ignore[call-overload]
            async for _ in stream:
                pass
    return float(str(task.input))


def request(task: Task, llm: LLM, text: str) -> tuple[str, dict[str, str], dict[str, object]]:
    message = {"role": "user", "content": f"{text} {task.input}"}
    body: dict[str, object] = {"model": llm.model, "messages": [message], "n": 2}
    headers = {"Authorization": f"Bearer {llm.api_key}", "Content-Type": "application/json"}
    return f"{llm.base_url}/chat/completions", headers, body


def with_urllib(task: Task, llm: LLM) -> float:
    for name in ("writer", "critic"):
        url, headers, body = request(task, llm, name)
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as reply:
            lightning.label(json.load(reply)["id"], agent=name, path=["boss", name])
    return 1.0


async def with_aiohttp(task: Task, llm: LLM) -> float:
    async with aiohttp.ClientSession() as client:
        for name in ("writer", "critic"):
            url, headers, body = request(task, llm, name)
            async with client.post(url, json=body, headers=headers) as reply:
                lightning.label(reply.headers["x-request-id"], agent=name, path=["boss", name])
    return 1.0


@pytest.mark.slow
@pytest.mark.parametrize("agent", [with_urllib, with_aiohttp])
async def test_a_client_that_the_tap_does_not_see_labels_its_calls(agent: Callable[[Task, LLM], float]) -> None:
    config = RunnerConfig(concurrency=2, timeout=60)
    store = MemoryStore()
    await store.open()
    await store.put_run(Run(RUN, "test"))
    await store.create_rollouts([Rollout(f"r{index}", RUN, Task(index), "g", index=index) for index in range(4)])
    async with FakeVLLM() as policy:
        gateway = Gateway(store, [Upstream(policy.url, policy.model)], GatewayConfig(), secret=b"s" * 32)
        await gateway.start()
        runner = ProcessRunner(agent, config)
        await runner.start()
        try:
            await work(store, runner, RUN, gateway.llm, worker="w", config=config, line=gateway.parts.line)
        finally:
            await runner.close()
            await gateway.close()
    for rollout in (await store.list_rollouts(RUN)).items:
        assert (rollout.status, rollout.error) == (Status.SUCCEEDED, "")
        calls = await store.transitions(rollout.id)
        assert [(call.status, call.choice) for call in calls] == [(CallStatus.OK, 0), (CallStatus.OK, 1)] * 2
        assert [call.caller for call in calls] == [
            Caller(name, ("boss", name)) for name in ("writer", "critic") for _ in "12"
        ]
    await store.close()


@pytest.mark.slow
async def test_every_call_lands_in_its_own_rollout_under_its_own_name() -> None:
    config = RunnerConfig(concurrency=8, timeout=60, preload=("openai.resources.chat",))  # else each worker does it
    store = MemoryStore()
    await store.open()
    await store.put_run(Run(RUN, "test"))
    await store.create_rollouts([Rollout(f"r{index}", RUN, Task(index), "g", index=index) for index in range(8)])
    async with FakeVLLM() as policy:
        gateway = Gateway(store, [Upstream(policy.url, policy.model)], GatewayConfig(), secret=b"s" * 32)
        await gateway.start()
        runner = ProcessRunner(agent, config)
        await runner.start()
        try:
            await work(store, runner, RUN, gateway.llm, worker="w", config=config, line=gateway.parts.line)
        finally:
            await runner.close()
            await gateway.close()
    rollouts = (await store.list_rollouts(RUN)).items
    assert [(rollout.status, rollout.error) for rollout in rollouts] == [(Status.SUCCEEDED, "")] * 8
    for rollout in rollouts:
        calls = await store.transitions(rollout.id)
        assert rollout.reward == rollout.task.input
        assert [call.status for call in calls] == [CallStatus.OK] * 2
        assert [call.caller.path for call in calls] == [("writer",), ("checker",)]
        assert {call.caller.framework for call in calls} == {"raw"}
        (event,) = list((await store.attempts_of([(rollout.id, None)]))[0].tool_events)
        assert event.status == ("error" if rollout.task.input == 3 else "ok")
        assert (event.caller, event.response_id) == (calls[0].caller, calls[0].id)
        steps = list((await store.attempts_of([(rollout.id, None)]))[0].step_rewards)
        assert [(step.value, step.response_id) for step in steps] == (
            [(-1.0, calls[0].id)] if rollout.task.input == 3 else []
        )
    asked = {request.body["messages"][0]["content"] for request in policy.requests}
    assert asked == {f"task {index}" for index in range(8)}
    await store.close()
