"""The definition of a demonstration: an agent, its tasks and a base model that can be trained in minutes on two cores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightning.algorithms.protocol import Algorithm
from lightning.runner.protocol import Agent
from lightning.types import Task


@dataclass(frozen=True, slots=True)
class Demo:
    """One demonstration. `tasks(n, seed)` makes training tasks, `val_tasks(n)` the held-out ones (never among the training
    tasks).

    `algorithm` makes the training algorithm, `settings` are configuration overrides (`{"trainer.steps": 30}`), and
    `describe(task)` says a task in words.
    """

    name: str
    title: str
    agent: Agent
    model: Path
    tasks: Callable[[int, int], Sequence[Task]]
    val_tasks: Callable[[int], Sequence[Task]]
    describe: Callable[[Task], str]
    algorithm: Callable[[], Algorithm]
    settings: Mapping[str, object] = field(default_factory=dict)
    train_agents: Sequence[str] = ()
    """The agents to train, as globs on the caller path; none named means all of them."""
    measure: str = "reward"
    """The value that the report shows of held-out tasks: `reward`, or the name of a part that the agent returns (`correct`)."""
    source: Path | None = None
    """The agent's own source file, shown as the next thing to read."""
