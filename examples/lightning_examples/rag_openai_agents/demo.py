"""`lightning demo rag`: this folder's agent, tasks and base model, with settings under which it learns in minutes."""

from __future__ import annotations

from pathlib import Path

import lightning
from lightning.demos import Demo

from lightning_examples.rag_openai_agents import MODEL
from lightning_examples.rag_openai_agents.agent import agent
from lightning_examples.rag_openai_agents.tasks import describe, tasks, val_tasks

SETTINGS = {
    "trainer.steps": 15,
    "trainer.tasks_per_step": 16,
    "trainer.eval_every": 0,
    # A thousand times a usual rate: this model has some 230 thousand weights, and every update is on-policy.
    "engine.lr": 2e-3,
    "engine.warmup_steps": 3,
    "policy_server.max_model_len": 1024,
    # A process pays once for the SDK (0.9 s of CPU for its first call), and two cores keep no more than these busy.
    "runner.concurrency": 16,
    "runner.preload": ("lightning_examples.rag_openai_agents.agent",),
}


def demo() -> Demo:
    """The demonstration as `lightning demo` runs it."""
    return Demo(
        name="rag",
        title="An OpenAI Agents SDK agent learns to answer questions in two searches",
        agent=agent,
        model=MODEL,
        tasks=tasks,
        val_tasks=val_tasks,
        describe=describe,
        algorithm=algorithm,
        settings=SETTINGS,
        source=Path(__file__).with_name("agent.py"),
    )


def algorithm() -> lightning.LightningRL:
    """GRPO; every token counts the same, so that long rollouts teach as much per token as short ones."""
    return lightning.LightningRL("grpo", group_size=8, normalization="token-mean", clip_low=0.2, clip_high=0.28)
