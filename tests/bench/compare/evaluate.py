"""Held-out reward of a model at several stages, the same way whoever trained it: a demonstration's own agent on a real vLLM.

Nothing of either trainer runs here. The agent calls vLLM directly, samples as it does in training, and one server serves
all stages, one after the other.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from lightning.config import Config, with_settings
from lightning.demos import Demo
from lightning.policy_server.vllm_server import make_policy_server
from lightning.types import LLM, Task

AT_ONCE = 32
Judge = Callable[[Path], list[float]]
"""From a safetensors file with weights to the demonstration's measure of all held-out tasks, in order."""


@contextmanager
def judging(demo: Demo, held_out: int, *, log: Path) -> Iterator[Judge]:
    """Start a vLLM with the demonstration's model; each call puts weights into it and runs the agent on every task."""
    config = with_settings(Config(), {"policy_server.max_model_len": 1024} | demo.settings)
    server = make_policy_server(demo.model, config, log=log)
    tasks: Sequence = demo.val_tasks(held_out)
    served = 0

    async def rewards(weights: Path) -> list[float]:
        nonlocal served
        served += 1
        await server.update(weights, served)
        llm = LLM(f"{server.url}/v1", "none", server.model)
        at_once = asyncio.Semaphore(AT_ONCE)

        async def reward(task: Task) -> float:
            async with at_once:
                if inspect.iscoroutinefunction(demo.agent):
                    answer = await demo.agent(task, llm)
                else:
                    answer = await asyncio.to_thread(demo.agent, task, llm)
                return float(answer[demo.measure] if isinstance(answer, Mapping) else answer)

        return await asyncio.gather(*map(reward, tasks))

    with asyncio.Runner() as runner:
        runner.get_loop().set_default_executor(ThreadPoolExecutor(AT_ONCE))
        try:
            runner.run(server.start())
            yield lambda weights: runner.run(rewards(weights))
        finally:
            runner.run(server.close())
