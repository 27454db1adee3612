"""Which rollouts a step needs: a pure function of the seed, so that a resumed run plans exactly what it planned before."""

from __future__ import annotations

import random
from collections.abc import Sequence

from lightning.errors import DataError
from lightning.types import Json, Rollout, Task

TRAIN, VAL = "train", "val"


def as_tasks(items: Sequence[Task | Json], what: str) -> list[Task]:
    """Wrap bare inputs into tasks and give repeated ids a suffix, in order, so that each position has its own id."""
    tasks = [item if isinstance(item, Task) else Task(input=item) for item in items]
    seen: dict[str, int] = {}
    for position, task in enumerate(tasks):
        if not isinstance(task.id, str) or "/" in task.id:
            raise DataError(f"{what}[{position}]: a task id must be a string without '/', not {task.id!r}")
        seen[task.id] = seen.get(task.id, 0) + 1
        if seen[task.id] > 1:
            tasks[position] = Task(task.input, task.expected, task.metadata, f"{task.id}.{seen[task.id]}")
    return tasks


def tasks_of_step(tasks: Sequence[Task], step: int, count: int, seed: int) -> list[Task]:
    """The `count` tasks of a step: consecutive slices of endless shuffled passes over `tasks`, no state between steps."""
    if not tasks:
        raise DataError("the list of training tasks is empty: give fit() at least one task in `train`")
    picked = []
    for position in range(step * count, (step + 1) * count):
        epoch, offset = divmod(position, len(tasks))
        order = list(range(len(tasks)))
        random.Random(f"{seed}/{epoch}").shuffle(order)  # noqa: S311 — an order, not a secret
        picked.append(tasks[order[offset]])
    return picked


def train_rollouts(run: str, step: int, tasks: Sequence[Task], group_size: int, max_attempts: int) -> list[Rollout]:
    """`group_size` rollouts for each task of a step; their ids are the same each time, so creating them twice is harmless."""
    return [
        Rollout(
            id=f"{run}/{step}/{place}/{index}",
            run=run,
            task=task,
            group=f"{run}/{step}/{place}",
            step=step,
            split=TRAIN,
            index=index,
            max_attempts=max_attempts,
        )
        for place, task in enumerate(tasks)
        for index in range(group_size)
    ]


def val_rollouts(run: str, step: int, tasks: Sequence[Task], max_attempts: int) -> list[Rollout]:
    """One rollout for each held-out task, evaluated with the policy that `step` optimizer steps produced."""
    return [
        Rollout(
            id=f"{run}/{VAL}/{step}/{place}",
            run=run,
            task=task,
            group=f"{run}/{VAL}/{step}/{place}",
            step=step,
            split=VAL,
            index=0,
            max_attempts=max_attempts,
        )
        for place, task in enumerate(tasks)
    ]
