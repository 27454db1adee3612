"""Sampling in turns: the same seed gives the same weights, and dynamic sampling goes on in waves, also after a crash."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.algorithms.lightning_rl import LightningRL
from lightning.trainer.plan import tasks_of_step, tasks_of_wave
from lightning.types import Task

DAPO = LightningRL("dapo", group_size=4)


@pytest.mark.slow
async def test_waves_end_at_their_limit(bench: Any, answering: Any, tmp_path: Path) -> None:
    async def useless(task: Task, llm: Any) -> float:
        await answering(task, llm)
        return 1.0

    async with bench(tmp_path, useless, algorithm=DAPO, trainer__max_waves=2, trainer__steps=2) as made:
        await made.loop.run({})
        records = await made.store.steps("run")
    assert [(record.metrics["waves"], record.metrics["groups_used"]) for record in records] == [(2.0, 0.0)] * 2
    assert [len(record.groups) for record in records] == [4, 4]


def test_waves_bring_other_tasks_and_leave_the_order_of_steps_alone() -> None:
    tasks = [Task(f"question {number}") for number in range(10)]
    for step in range(5):
        own = tasks_of_wave(tasks, step, 0, 3, seed=1)
        assert own == tasks_of_step(tasks, step, 3, 1)
        more = [task.id for wave in (1, 2) for task in tasks_of_wave(tasks, step, wave, 3, seed=1)]
        assert len(set(more)) == 6, "each task once before any comes again"
        assert not set(more) & {task.id for task in own}
    assert tasks_of_wave(tasks, 0, 1, 3, seed=1) != tasks_of_wave(tasks, 0, 1, 3, seed=2)
    assert len(tasks_of_wave(tasks[:2], 0, 1, 3, seed=1)) == 3, "with no other tasks there are the step's own"
