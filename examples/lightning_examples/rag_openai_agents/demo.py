"""`lightning demo rag`: this folder's agent, tasks and base model, with settings under which it learns in minutes."""

from __future__ import annotations

from pathlib import Path

from lightning.demos import Demo

from lightning_examples.demonstrations import TINY, algorithm
from lightning_examples.rag_openai_agents import MODEL
from lightning_examples.rag_openai_agents.agent import agent
from lightning_examples.rag_openai_agents.tasks import describe, tasks, val_tasks

SETTINGS = {
    **TINY,
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
