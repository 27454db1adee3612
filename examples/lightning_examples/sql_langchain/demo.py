"""`lightning demo sql`: this folder's agent, tasks and base model, with settings under which it learns in minutes."""

from __future__ import annotations

from pathlib import Path

import lightning
from lightning.demos import Demo

from lightning_examples.sql_langchain import MODEL
from lightning_examples.sql_langchain.agent import agent
from lightning_examples.sql_langchain.tasks import describe, tasks, val_tasks

SETTINGS = {
    "trainer.steps": 25,
    "trainer.tasks_per_step": 16,
    "trainer.eval_every": 0,
    # A thousand times a usual rate: this model has 250 thousand weights, and every update is on-policy.
    "engine.lr": 2e-3,
    "engine.warmup_steps": 3,
    "policy_server.max_model_len": 512,
    "runner.concurrency": 32,
    "runner.preload": ("lightning_examples.sql_langchain.agent",),
}


def demo() -> Demo:
    """The demonstration as `lightning demo` runs it."""
    return Demo(
        name="sql",
        title="A LangGraph agent learns to write SQL, and to rewrite it when a checker is not content",
        agent=agent,
        model=MODEL,
        tasks=tasks,
        val_tasks=val_tasks,
        describe=describe,
        algorithm=algorithm,
        settings=SETTINGS,
        train_agents=("write", "rewrite"),
        source=Path(__file__).with_name("agent.py"),
    )


def algorithm() -> lightning.LightningRL:
    """GRPO; every token counts the same. The checker's calls are recorded, but never trained."""
    return lightning.LightningRL("grpo", group_size=8, normalization="token-mean", clip_low=0.2, clip_high=0.28)
