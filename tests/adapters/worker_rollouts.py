"""One rollout in a worker process for each agent, with every adapter that is found, before a policy server with a script."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning.config import GatewayConfig, RunnerConfig
from lightning.gateway import Gateway, Upstream
from lightning.runner.lease_loop import work
from lightning.runner.process import ProcessRunner
from lightning.store.memory import MemoryStore
from lightning.testing import FakeVLLM, Reply
from lightning.types import LLM, Rollout, Run, Status, Task, ToolEvent, Transition

RUN = "rollouts"


class Left:
    """What a rollout left in the store."""

    def __init__(self, calls: list[Transition], events: list[ToolEvent], error: str) -> None:
        self.calls, self.events, self.error = calls, events, error

    def paths(self, framework: str) -> list[str]:
        """Who called, in order; each call is the framework's, and has its tokens."""
        assert not self.error, self.error
        for call in self.calls:
            assert call.caller.framework == framework
            assert call.prompt_ids
            assert len(call.response_ids) == len(call.logprobs) > 0
        return ["/".join(call.caller.path) for call in self.calls]


async def run_in_worker(
    agent: Callable[[Task, LLM], float],
    names: list[str],
    script: Callable[[Mapping[str, Any]], Reply],
    config: RunnerConfig,
) -> dict[str, Left]:
    """Run the agent once for each name, which is its task's input."""
    store = MemoryStore()
    await store.open()
    await store.put_run(Run(RUN, RUN))
    await store.create_rollouts([Rollout(name, RUN, Task(name), name, max_attempts=1) for name in names])
    runner = ProcessRunner(agent, config)
    async with FakeVLLM(script=script) as fake:
        gateway = Gateway(store, [Upstream(fake.url, fake.model)], GatewayConfig(), secret=b"s" * 32)
        await gateway.start()
        await runner.start()
        try:
            await work(store, runner, RUN, gateway.llm, worker="w", config=config, line=gateway.parts.line)
        finally:
            await runner.close()
            await gateway.close()
    found = {}
    for rollout in (await store.list_rollouts(RUN)).items:
        calls = await store.transitions(rollout.id, 1)
        (attempt,) = await store.attempts_of([(rollout.id, 1)])
        error = "" if rollout.status is Status.SUCCEEDED else rollout.error
        found[rollout.id] = Left(calls, list(attempt.tool_events), error)
    return found
