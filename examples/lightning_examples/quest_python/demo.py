"""`lightning demo quest`: this folder's agent and tasks on SmolLM2, with settings for some minutes on two cores."""

from __future__ import annotations

from pathlib import Path

import lightning
from lightning.demos import Demo

from lightning_examples.quest_python.agent import agent
from lightning_examples.quest_python.tasks import describe, tasks, val_tasks
from lightning_examples.smollm2 import model_folder

SETTINGS: dict[str, object] = {
    "trainer.steps": 12,
    "trainer.tasks_per_step": 6,
    "trainer.order": "given",  # each pair of colours once in a step
    "trainer.eval_every": 0,
    "engine.threads": 0,  # all cores: vLLM samples and the engine trains in turns
    # A choice is one token, and where two are as likely bfloat16 rounds their odds too far.
    "engine.dtype": "float32",
    "policy_server.dtype": "float32",
    "engine.lr": 1e-5,
    "engine.warmup_steps": 2,
    "policy_server.max_model_len": 512,
    "runner.concurrency": 32,
    "runner.preload": ("lightning_examples.quest_python.agent",),
}


def algorithm() -> lightning.LightningRL:
    """GRPO with the credit of one reward for all calls; a little entropy keeps the choices open."""
    return lightning.LightningRL("grpo", group_size=8, entropy_coefficient=0.02)


def demo() -> Demo:
    """The demonstration as `lightning demo` runs it; converts the model first where that has not been done."""
    return Demo(
        name="quest",
        title="SmolLM2-135M goes on a quest of eight choices",
        agent=agent,
        model=model_folder(),
        tasks=tasks,
        val_tasks=val_tasks,
        describe=describe,
        algorithm=algorithm,
        settings=SETTINGS,
        source=Path(__file__).with_name("agent.py"),
    )
