"""Plugins at a run's beginning and end: its steps say which stood there, and a resume without one says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.plugins.stages import NamedStage
from lightning.trainer.context import STAGES
from lightning.trainer.run_stages import RunLine, RunStage


class Watch(RunStage):
    api = 1


async def test_each_step_says_which_stages_stood_at_the_run_and_a_resume_names_one_that_is_gone(
    bench: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with bench(tmp_path, trainer__steps=1) as made:
        made.loop.run_line = RunLine([NamedStage("watch", Watch(), "1.0", "theirs")])
        await made.loop.run({})
        records = await made.store.steps("run")
    assert [record.context[STAGES]["runs"] for record in records] == [[["watch", "1.0"]]]
    assert "made with other stages" not in caplog.text
    async with bench(tmp_path, trainer__steps=2) as made:
        await made.loop.run({})
        records = await made.store.steps("run")
    assert [record.context[STAGES]["runs"] for record in records] == [[["watch", "1.0"]], []]
    assert "runs are made with other stages than in step 1: 'watch' (1.0) is missing" in caplog.text
