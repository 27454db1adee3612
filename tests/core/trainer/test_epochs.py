"""Settings that change while a run lives: each step keeps those that it was taken with, also when it is taken again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from lightning.algorithms.lightning_rl import LightningRL
from lightning.types import StepRecord

Bench = Callable[..., AbstractAsyncContextManager[Any]]


async def trained(bench: Bench, folder: Path, **settings: Any) -> tuple[list[str], list[StepRecord]]:
    """Go on with a run in a folder; what its engine learned from, and its steps."""
    async with bench(folder, trainer__eval_every=0, **settings) as run:
        await run.loop.run({})
        return run.engine.ledger, await run.store.steps(run.loop.stack.run.id)


async def test_a_step_that_was_begun_with_other_tasks_is_planned_again(bench: Bench, tmp_path: Path) -> None:
    """Rollouts of the step were made for groups of four: a resume with three of each makes its own."""
    folder = tmp_path / "run"
    async with bench(folder, trainer__eval_every=0, trainer__steps=1) as run:
        run.engine.crash_at = "step:0"
        with pytest.raises(run.Crash):
            await run.loop.run({})
    _, (record,) = await trained(bench, folder, trainer__steps=1, algorithm=LightningRL("grpo", group_size=3))
    assert record.groups == ("run/1~1/0", "run/1~1/1")
