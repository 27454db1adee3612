"""Config epochs are audited by the settings of each."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from lightning.algorithms.lightning_rl import LightningRL
from lightning.trainer.algorithm import AlgorithmSchedule
from lightning.trainer.context import NUMERIC, read_epochs
from lightning.trainer.runs import changes_of
from lightning.types import StepRecord
from lightning_proof.audit import audit

from tests.core.trainer.test_epochs import Bench, trained

SCHEDULE = AlgorithmSchedule(((1, LightningRL("rloo", group_size=2)), (3, LightningRL("grpo", group_size=3))), 3)


async def test_steps_are_taken_again_with_the_settings_of_their_own_epoch(bench: Bench, tmp_path: Path) -> None:
    """With the newest checkpoint behind, a resume with another learning rate takes the steps since with the old one."""
    folder = tmp_path / "run"
    before, _ = await trained(bench, folder, trainer__steps=2, trainer__checkpoint_every=5)
    checkpoint = folder / "checkpoints" / "step-00000002"
    for file in checkpoint.iterdir():  # as if the run had been killed before the last one was written
        file.unlink()
    checkpoint.rmdir()
    async with bench(folder, trainer__eval_every=0, trainer__steps=4, engine__lr=0.5) as run:
        assert checkpoint.is_dir(), "the old settings lead to a checkpoint, where the new ones begin"
        await run.loop.run({})
        assert run.engine.ledger[:2] == before
        records = await run.store.steps("run")
        assert [record.context["epoch"] for record in records] == [0, 0, 1, 1]
        stored = await run.store.get_run("run")
        epochs = await read_epochs(run.store, stored)
        assert changes_of(epochs, 1) == [
            "engine.lr null → 0.5",
            "trainer.checkpoint_every 5 → null",
            "trainer.steps 2 → 4",
        ]
        report = await audit(run.store, "run")
        assert (report.ok, report.rederived, report.epochs, report.warnings) == (True, True, 2, ())
    again, _ = await trained(bench, folder, trainer__steps=4, engine__lr=0.5)
    assert again[:2] == before


async def test_an_audit_derives_each_step_by_the_algorithm_of_its_epoch(bench: Bench, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    await trained(bench, folder, trainer__steps=1, algorithm=LightningRL("rloo", group_size=4))
    async with bench(
        folder, trainer__eval_every=0, trainer__steps=2, algorithm=LightningRL("grpo", group_size=2)
    ) as run:
        await run.loop.run({})
        second = (await run.store.steps("run"))[1]
        assert (await audit(run.store, "run")).ok
        assert len(second.rollouts) <= 4 < 8 == len((await run.store.list_rollouts("run", split="train", step=1)).items)
        await run.store.put_state("run", "epochs", [])  # as if nobody had noted the change
        report = await audit(run.store, "run")
    assert {finding.step for finding in report.findings} == {second.step}
    assert any("says it is of config epoch 1" in finding.problem for finding in report.findings)
    assert any("its training rows are not the ones" in finding.problem for finding in report.findings)


async def test_a_schedule_trains_each_phase_with_its_algorithm(bench: Bench, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    await trained(bench, folder, trainer__steps=1, algorithm=SCHEDULE)
    async with bench(folder, trainer__eval_every=0, algorithm=SCHEDULE) as run:
        await run.loop.run({})
        records = await run.store.steps("run")
        sizes = [len((await run.store.list_rollouts("run", step=step, split="train")).items) for step in (1, 2, 3)]
        assert sizes == [4, 4, 6]
        names = [
            epoch.config["algorithm"]["arguments"]["low_level"]
            for epoch in await read_epochs(run.store, run.loop.stack.run)
        ]
        assert names == ["rloo", "rloo", "grpo"], "more steps began an epoch, too"
        assert [record.context["epoch"] for record in records] == [0, 1, 2]
        assert (await audit(run.store, "run")).ok


async def test_a_schedule_goes_on_in_asynchronous_training(bench: Bench, tmp_path: Path) -> None:
    async with bench(tmp_path / "run", trainer__max_staleness=1, trainer__eval_every=0, algorithm=SCHEDULE) as run:
        await run.loop.run({})
        assert len(await run.store.steps("run")) == 3, "also those in which all rollouts happened to earn the same"
        assert (await audit(run.store, "run")).ok


async def test_a_run_may_go_on_asynchronously_and_in_turns_again(bench: Bench, tmp_path: Path) -> None:
    folder, ledger = tmp_path / "run", []
    for steps, staleness in ((1, 0), (3, 1), (4, 0)):
        before = ledger
        ledger, records = await trained(bench, folder, trainer__steps=steps, trainer__max_staleness=staleness)
        assert ledger[: len(before)] == before
        assert len(records) == steps
    async with bench(folder, trainer__steps=4, trainer__eval_every=0) as run:
        report = await audit(run.store, "run")
        assert (report.ok, report.epochs) == (True, 3)


async def test_a_record_says_how_its_step_was_computed(bench: Bench, tmp_path: Path) -> None:
    async with bench(tmp_path / "run", trainer__eval_every=0, trainer__steps=2) as run:
        await run.loop.run({})
        first, second = await run.store.steps("run")
        assert first.context.keys() == {"epoch", "weights", "base", "stages", *NUMERIC}
        assert (first.context["base"], first.context["weights"]) == ("the base", "the base")
        assert first.context["versions"]["lightning"]
        assert first.context["path"] == run.loop.stack.config.engine.step
        records = [first, replace(second, context={**second.context, "threads": 7, "path": "tree"})]
        run.store.steps = lambda run: _answer(records)
        report = await audit(run.store, "run")
    assert report.ok
    assert report.warnings == ("from step 2 on sums are rounded otherwise than before: threads 1 → 7",)


async def test_a_step_that_is_computed_elsewhere_is_said_to_be_rounded(
    bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    settings = {"trainer__eval_every": 0, "trainer__steps": 2, "trainer__checkpoint_every": 5}
    for crash_at, threads in ((1, 1), (-1, 3)):
        async with bench(folder, **settings, engine__threads=threads) as run:
            run.engine.numerics = lambda threads=threads: {"threads": threads}
            run.policy.crash_at = crash_at
            with nullcontext() if crash_at < 0 else pytest.raises(run.Crash):
                await run.loop.run({})
    assert "step 1 is taken again with other threads (1 → 3): it is the same but for rounding" in caplog.text


async def test_a_resume_and_an_audit_name_the_stages_that_are_not_there_any_more(
    bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Texts are not recorded any more: their stage is missing."""
    folder = tmp_path / "run"
    await trained(bench, folder, trainer__steps=1)
    assert "other stages" not in caplog.text
    await trained(bench, folder, trainer__steps=2, gateway__record_requests=False)
    assert "calls are made with other stages than in step 1: 'texts' (" in caplog.text
    assert "is missing. For the same ones install the plugins" in caplog.text
    async with bench(folder, trainer__steps=2, trainer__eval_every=0) as run:
        (warning,) = (await audit(run.store, "run")).warnings
    assert warning.startswith("from step 2 on calls were made with other stages than before: 'texts' (")


async def test_a_resume_and_an_audit_name_the_stages_that_are_not_around_attempts_any_more(
    bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    await trained(bench, folder, trainer__steps=1, runner__tool_limits={"browser": 1})
    await trained(bench, folder, trainer__steps=2)
    assert "attempts are made with other stages than in step 1: 'tool_limits' (" in caplog.text
    assert "calls are made with other stages" not in caplog.text
    async with bench(folder, trainer__steps=2, trainer__eval_every=0) as run:
        (warning,) = (await audit(run.store, "run")).warnings
    assert warning.startswith("from step 2 on attempts were made with other stages than before: 'tool_limits' (")


async def _answer(records: list[StepRecord]) -> list[StepRecord]:
    return records
