"""`lightning demo calculator`: this folder's agent and tasks on SmolLM2, with settings under which it learns in minutes."""

from __future__ import annotations

from pathlib import Path

import lightning
from lightning.demos import Demo

from lightning_examples.calculator_autogen.agent import agent
from lightning_examples.calculator_autogen.tasks import describe, tasks, val_tasks
from lightning_examples.smollm2 import model_folder

SETTINGS: dict[str, object] = {
    "trainer.steps": 8,
    "trainer.tasks_per_step": 8,
    "trainer.eval_every": 0,
    "engine.threads": 0,  # all cores: vLLM samples and the engine trains in turns
    "engine.lr": 1.5e-5,
    "engine.warmup_steps": 2,
    "runner.concurrency": 64,
    "runner.adapters": ("autogen",),
    "runner.preload": ("lightning_examples.calculator_autogen.agent",),
}


def algorithm() -> lightning.LightningRL:
    """GRPO; a little entropy keeps a model that is sure of itself from narrowing to one way of writing."""
    return lightning.LightningRL("grpo", group_size=8, entropy_coefficient=0.005)


def demo() -> Demo:
    """The demonstration as `lightning demo` runs it; converts the model first where that has not been done."""
    return Demo(
        name="calculator",
        title="SmolLM2-135M behind an AutoGen agent learns to use a calculator",
        agent=agent,
        model=model_folder(),
        tasks=tasks,
        val_tasks=val_tasks,
        describe=describe,
        algorithm=algorithm,
        settings=SETTINGS,
        measure="correct",
        source=Path(__file__).with_name("agent.py"),
    )
