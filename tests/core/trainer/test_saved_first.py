"""Where nothing takes recorded steps again, the checkpoint of a step that taught is on disk before its commit."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from lightning.config import Config, with_settings
from lightning.engines.protocol import Engine
from lightning.errors import ConfigError, EngineError, PluginError
from lightning.plugins.stages import NamedStage
from lightning.trainer.context import Epoch, Teacher
from lightning.trainer.run_stages import BringForward, RunLine, RunStage, Start
from lightning.types import StepRecord

Open = Callable[..., AbstractAsyncContextManager[Any]]
STEPS = 3


def cut_at_commit(made: Any, step: int) -> None:
    """Fall where a `kill -9` would between a checkpoint and the commit of its step."""
    commit = made.store.commit_step

    async def commit_step(record: StepRecord) -> None:
        if record.step == step:
            raise made.Crash(f"commit:{step}")
        await commit(record)

    made.store.commit_step = commit_step


def second_is_idle(made: Any) -> None:
    """Let the second step teach nothing."""
    step = made.loop.step

    async def idle_or_not(number: int) -> Any:
        made.engine.idle = number == 2
        return await step(number)

    made.loop.step = idle_or_not


@pytest.mark.parametrize("checkpoint_every", [None, 1])
async def test_a_step_that_taught_is_on_disk_before_it_is_committed(
    bench: Open, tmp_path: Path, checkpoint_every: int | None
) -> None:
    async with bench(tmp_path, trainer__keep_checkpoints=9, trainer__checkpoint_every=checkpoint_every) as made:
        second_is_idle(made)
        there, commit = [], made.store.commit_step

        async def commit_step(record: StepRecord) -> None:
            there.append(made.loop.checkpoints.steps())
            await commit(record)

        made.store.commit_step = commit_step
        await made.loop.run({})
        assert there == [[1], [1], [1, 3]], "what taught nothing changed no weights"
        records = await made.store.steps("run")
        assert [record.checkpoint for record in records] == ["step-00000001", "step-00000001", "step-00000003"]
        assert [done for done in made.engine.did if done.startswith("save")] == [
            "save:step-00000001",
            "save:step-00000003",
        ]


@pytest.mark.parametrize("keep", [1, 2])
async def test_a_cut_between_a_checkpoint_and_its_commit_loses_nothing_and_takes_no_step_twice(
    bench: Open, tmp_path: Path, keep: int
) -> None:
    async with bench(tmp_path, trainer__keep_checkpoints=keep) as made:
        cut_at_commit(made, 2)
        with pytest.raises(made.Crash):
            await made.loop.run({})
        assert 2 in made.loop.checkpoints.steps(), "it is ahead of the store"
        first, (committed,) = made.engine.ledger, await made.store.steps("run")
    async with bench(tmp_path, trainer__keep_checkpoints=keep) as made:
        await made.loop.restore()
        assert made.engine.ledger == first[:1], "a step that was not committed is not there"
        assert made.engine.losses == [], "nothing was taken again"
        await made.loop.run({})
        assert made.engine.ledger[:2] == first, "it is taken from the same rollouts"
        assert len(made.engine.ledger) == STEPS
        assert len(made.engine.losses) == STEPS - 1
        records = await made.store.steps("run")
        assert (records[0], len(records)) == (committed, STEPS)


async def test_a_cut_behind_a_commit_costs_nothing(bench: Open, tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        made.policy.crash_at = 2
        with pytest.raises(made.Crash):
            await made.loop.run({})
        trained = made.engine.ledger
    async with bench(tmp_path) as made:
        await made.loop.restore()
        assert (made.engine.ledger, made.engine.losses) == (trained, [])


async def test_steps_that_taught_nothing_are_passed_over_by_a_resume(bench: Open, tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        second_is_idle(made)
        cut_at_commit(made, 3)
        with pytest.raises(made.Crash):
            await made.loop.run({})
        trained = made.engine.ledger[:1]
    async with bench(tmp_path) as made:
        await made.loop.restore()
        assert (made.loop.done, made.engine.ledger, made.engine.losses) == (2, trained, [])
        assert made.policy.ledger == trained


def test_an_interval_is_refused_by_name() -> None:
    line, alone = RunLine(), "no plugin is there that carries it out"
    for every in (None, 1):
        line.check(with_settings(Config(), {"trainer.checkpoint_every": every}))
    with pytest.raises(ConfigError, match=rf"trainer\.checkpoint_every = 2 leaves steps .*{alone}") as refused:
        line.check(with_settings(Config(), {"trainer.checkpoint_every": 2}))
    assert re.search(r"plugin 'proof' brings it.*set trainer\.checkpoint_every = 1", str(refused.value))


async def test_a_run_whose_last_step_has_no_checkpoint_is_refused_by_name(bench: Open, tmp_path: Path) -> None:
    async with bench(tmp_path, trainer__keep_checkpoints=9) as made:
        await made.loop.run({})
        before = await made.store.steps("run")
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000003")
    with pytest.raises(ConfigError, match=r"step 3 of 'run' has no checkpoint, .*no plugin is there") as refused:
        async with bench(tmp_path, trainer__steps=4):
            pass
    assert re.search(r"plugin 'proof' brings it.*give another `out`", str(refused.value))
    assert sorted(place.name for place in (tmp_path / "checkpoints").iterdir()) == ["step-00000001", "step-00000002"]
    for place in (tmp_path / "checkpoints").iterdir():
        shutil.rmtree(place)
    with pytest.raises(ConfigError, match="step 1 of 'run' has no checkpoint"):
        async with bench(tmp_path, trainer__steps=4):
            pass
    async with bench(tmp_path, trainer__steps=4, run_stages=lambda config: RunLine([named(Again())])) as made:
        assert await made.store.steps("run") == before


class Again(RunStage):
    """Takes steps again by writing down which."""

    api = 1

    def __init__(self) -> None:
        self.taken: list[int] = []

    async def bring_forward(
        self, start: Start, records: Sequence[StepRecord], epochs: Sequence[Epoch], teacher: Teacher | None
    ) -> BringForward:
        async def bring(engine: Engine, again: Sequence[StepRecord]) -> None:
            if again[0].step == 1:
                raise ValueError("the first step is not there")
            self.taken += [record.step for record in again]

        return bring


def named(stage: RunStage) -> NamedStage[RunStage]:
    return NamedStage("again", stage, "1.0", "theirs")


async def test_a_stage_takes_the_steps_since_the_newest_checkpoint_and_its_failure_has_its_name(
    bench: Open, tmp_path: Path
) -> None:
    stage = Again()
    more: dict[str, Any] = {
        "run_stages": lambda config: RunLine([named(stage)]),
        "trainer__checkpoint_every": 9,
        "trainer__keep_checkpoints": 9,
    }
    async with bench(tmp_path, trainer__checkpoint_every=1, trainer__keep_checkpoints=9) as made:
        await made.loop.run({})
    for number in (2, 3):
        shutil.rmtree(tmp_path / "checkpoints" / f"step-0000000{number}")
    async with bench(tmp_path, **more) as made:
        await made.loop.restore()
        assert stage.taken == [2, 3]
        assert made.loop.writer.unsaved
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000001")
    async with bench(tmp_path, **more) as made:
        with pytest.raises(PluginError, match=r"stage 'again' of the plugin 'theirs' failed .*step is not there"):
            await made.loop.restore()


class Computes(Again):
    """Asks the engine for each step, in a thread."""

    async def bring_forward(
        self, start: Start, records: Sequence[StepRecord], epochs: Sequence[Epoch], teacher: Teacher | None
    ) -> BringForward:
        async def bring(engine: Engine, again: Sequence[StepRecord]) -> None:
            await asyncio.to_thread(engine.forward_backward, [], None)  # type: ignore[arg-type]

        return bring


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error: an illegal access"), EngineError("out of memory on a row")]
)
async def test_an_engine_that_fails_at_a_step_that_is_taken_again_is_blamed_itself(
    bench: Open, tmp_path: Path, error: Exception
) -> None:
    async with bench(tmp_path, trainer__checkpoint_every=1) as made:
        await made.loop.run({})
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000003")
    stages: dict[str, Any] = {"run_stages": lambda config: RunLine([named(Computes())])}
    async with bench(tmp_path, trainer__checkpoint_every=9, **stages) as made:
        made.engine.fail_next = error
        with pytest.raises(EngineError, match=re.escape(str(error))) as failed:
            await made.loop.restore()
        assert "theirs" not in str(failed.value)
