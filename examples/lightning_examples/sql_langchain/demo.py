"""`lightning demo sql`: this folder's agent, tasks and base model, with settings under which it learns in minutes."""

from __future__ import annotations

from pathlib import Path

from lightning.demos import Demo

from lightning_examples.demonstrations import TINY, algorithm
from lightning_examples.sql_langchain import MODEL
from lightning_examples.sql_langchain.agent import agent
from lightning_examples.sql_langchain.tasks import describe, tasks, val_tasks

SETTINGS = {
    **TINY,
    "trainer.steps": 25,
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
        train_agents=("write", "rewrite"),  # the checker's calls are recorded, but never trained
        source=Path(__file__).with_name("agent.py"),
    )
