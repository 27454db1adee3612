"""Held-out reward of a model at several stages, the same way whoever trained it: the example's own agent on a real vLLM.

Nothing of either trainer runs here. The agent calls vLLM directly, samples as it does in training, and one server serves
all stages, one after the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from lightning.config import PolicyServerConfig
from lightning.demos import Demo
from lightning.policy_server import make_policy_server
from lightning.types import LLM

AT_ONCE = 32
Judge = Callable[[Path], list[float]]
"""From a safetensors file with weights to the rewards of all held-out tasks, in order."""


@contextmanager
def judging(demo: Demo, held_out: int, *, log: Path) -> Iterator[Judge]:
    """Start a vLLM with the demonstration's model; each call puts weights into it and runs the agent on every task."""
    server = make_policy_server(demo.model, PolicyServerConfig(max_model_len=1024), log=log)
    tasks: Sequence = demo.val_tasks(held_out)
    served = 0

    async def rewards(weights: Path) -> list[float]:
        nonlocal served
        served += 1
        await server.update(weights, served)
        llm = LLM(f"{server.url}/v1", "none", server.model)
        return await asyncio.gather(*(loop.run_in_executor(pool, demo.agent, task, llm) for task in tasks))

    with asyncio.Runner() as runner, ThreadPoolExecutor(AT_ONCE) as pool:
        loop = runner.get_loop()
        try:
            runner.run(server.start())
            yield lambda weights: runner.run(rewards(weights))
        finally:
            runner.run(server.close())
