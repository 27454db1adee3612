"""Worker processes, the real gateway, a scripted policy server and a store, together."""

from __future__ import annotations

import lightning
import openai
from lightning.config import GatewayConfig, RunnerConfig
from lightning.gateway import Gateway, Upstream
from lightning.runner.process import ProcessRunner
from lightning.runner.work import work
from lightning.store.memory import MemoryStore
from lightning.testing.fake_vllm import FakeVLLM
from lightning.types import LLM, CallStatus, Rollout, Run, Status, Task

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


async def test_every_call_lands_in_its_own_rollout_under_its_own_name() -> None:
    config = RunnerConfig(concurrency=8, timeout=60)
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
            await work(store, runner, RUN, gateway.llm, worker="w", config=config)
        finally:
            await runner.close()
            await gateway.close()
    rollouts = (await store.list_rollouts(RUN)).rollouts
    assert [(rollout.status, rollout.error) for rollout in rollouts] == [(Status.SUCCEEDED, "")] * 8
    for rollout in rollouts:
        calls = await store.transitions(rollout.id)
        assert rollout.reward == rollout.task.input
        assert [call.status for call in calls] == [CallStatus.OK] * 2
        assert [call.caller.path for call in calls] == [("writer",), ("checker",)]
        assert {call.caller.framework for call in calls} == {"raw"}
        (event,) = await store.tool_events(rollout.id)
        assert event.status == ("error" if rollout.task.input == 3 else "ok")
        assert event.caller == calls[0].caller
        steps = await store.step_rewards(rollout.id)
        assert [step.value for step in steps] == ([-1.0] if rollout.task.input == 3 else [])
    asked = {request.body["messages"][0]["content"] for request in policy.requests}
    assert asked == {f"task {index}" for index in range(8)}
    await store.close()
