"""`lightning demo opposites`: a policy for each of two players, in one run."""

from __future__ import annotations

from pathlib import Path

from lightning.demos import Demo

from lightning_examples.demonstrations import TINY, algorithm
from lightning_examples.opposites.agent import agent, describe, tasks, val_tasks
from lightning_examples.raw_python import MODEL

SETTINGS = {
    **TINY,
    "trainer.steps": 6,
    "trainer.tasks_per_step": 8,
    "engine.lr": 1e-2,
    "engine.lora.rank": 8,
    "policies.low.agents": ["low"],
    "policies.high.agents": ["high"],
    "policy_server.max_model_len": 256,
    "runner.concurrency": 32,
    "runner.preload": ("lightning_examples.opposites.agent",),
}


def demo() -> Demo:
    """The demonstration as `lightning demo` runs it."""
    return Demo(
        name="opposites",
        title="Two players with one prompt and opposite aims learn with a policy for each",
        agent=agent,
        model=MODEL,
        tasks=tasks,
        val_tasks=val_tasks,
        describe=describe,
        algorithm=algorithm,
        settings=SETTINGS,
        source=Path(__file__).with_name("agent.py"),
    )
