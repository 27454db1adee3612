"""Which tasks both sides train on: those that lightning's trainer takes for a seed, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from lightning.trainer.plan import tasks_of_step
from lightning.types import Task

POOL = 4000
"""Training tasks to draw from, as in `lightning demo`."""


def planned(pool: Sequence[Task], steps: int, count: int, seed: int) -> list[list[tuple[str, int]]]:
    """For each step its `count` tasks, as question and answer."""
    return [
        [(str(task.input), cast(int, task.expected)) for task in tasks_of_step(pool, step, count, seed)]
        for step in range(steps)
    ]
