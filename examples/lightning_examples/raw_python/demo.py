"""`lightning demo tiny`: this folder's agent, tasks and base model, with settings under which it learns in minutes."""

from __future__ import annotations

from pathlib import Path

from lightning.demos import Demo

from lightning_examples.demonstrations import TINY, algorithm
from lightning_examples.raw_python import MODEL
from lightning_examples.raw_python.agent import agent
from lightning_examples.word_problems import describe, tasks, val_tasks

SETTINGS = {
    **TINY,
    "policy_server.max_model_len": 1024,
    "runner.concurrency": 32,
    "runner.preload": ("lightning_examples.raw_python.agent",),
}


def demo() -> Demo:
    """The demonstration as `lightning demo` runs it."""
    return Demo(
        name="tiny",
        title="A plain Python agent learns to solve word problems with a calculator",
        agent=agent,
        model=MODEL,
        tasks=tasks,
        val_tasks=val_tasks,
        describe=describe,
        algorithm=algorithm,
        settings=SETTINGS,
        source=Path(__file__).with_name("agent.py"),
    )
