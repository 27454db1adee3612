"""A loop of somebody's own is audited."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from lightning.algorithms.lightning_rl import LightningRL
from lightning.algorithms.protocol import Batch
from lightning.batch.sample import Sample
from lightning.cli.app import build
from lightning.testing.trajectories import make_group
from lightning.trainer.training_data import all_rollouts
from lightning.types import StepRecord
from lightning_proof.audit import audit
from lightning_proof.recorded_step import row_digests
from lightning_session.session import Session
from typer.testing import CliRunner

from tests.plugins.session.test_session import TASKS, Open, take


async def test_steps_of_ones_own_are_recorded_served_and_audited(bench: Open, tmp_path: Path) -> None:
    async with bench(tmp_path / "run", own_loop=True) as made, Session(made.loop) as session:
        for step in range(3):
            assert session.step == step
            metrics = await take(session, updates=2)
            assert (metrics["updates"], metrics["lr"], metrics["drift_tokens"]) == (2.0, 0.5, 0.0)
            assert made.policy.version == step + 1
            assert made.policy.ledger == made.engine.ledger
        assert len(made.engine.ledger) == 6
        assert made.engine.ledger[0].startswith("0.5:")
        records = await made.store.steps("run")
        assert [record.policy_version for record in records] == [1, 2, 3]
        assert all(record.context["own_loop"] and record.checkpoint for record in records)
        report = await audit(made.store, "run")
        assert (report.steps, report.ok) == (3, True)


def test_a_row_s_digest_knows_whose_row_it_is() -> None:
    row = LightningRL().batch([make_group([1.0, 0.0])]).samples[0]
    (what, how), other = row_digests(row), row_digests(replace(row, policy="other"))
    assert (what != other[0], how == other[1]) == (True, True)


def _negated(batch: Batch) -> list[Sample]:
    return [replace(row, weights=-row.weights) for row in batch.samples]


def _other_advantages(batch: Batch) -> list[Sample]:
    return [replace(row, advantages=row.advantages + 1) for row in batch.samples]


def _twice(batch: Batch) -> list[Sample]:
    return [*batch.samples, *batch.samples]


def _in_place(batch: Batch) -> list[Sample]:
    batch.samples[0].weights[:] *= -1
    return list(batch.samples)


def _as_made(batch: Batch) -> list[Sample]:
    return list(reversed(batch.samples))


@pytest.mark.parametrize("rows", [_negated, _other_advantages, _twice, _in_place, _as_made])
async def test_an_audit_says_whether_the_loop_changed_the_rows(
    rows: Callable[[Batch], list[Sample]], bench: Open, tmp_path: Path
) -> None:
    async with bench(tmp_path / "run", own_loop=True) as made, Session(made.loop) as session:
        await take(session)
        batch = await session.batch(await session.rollout(TASKS))
        await session.forward_backward(batch)
        await session.optim_step(lr=0.5)
        await session.forward_backward(batch, rows(batch))
        await session.optim_step(lr=0.25)
        await session.publish()
        report = await audit(made.store, "run")
        assert report.ok, report.findings
        said = await asyncio.to_thread(CliRunner().invoke, build("audit"), ["audit", str(tmp_path / "run")])
        assert ("as it was trained" if rows is _as_made else "changed by the loop in 1 step") in said.output
        assert ("as it was trained" in said.output) == (rows is _as_made)
        assert report.changed == (() if rows is _as_made else (2,))
        updates = (await made.store.last_step("run")).context["own_loop"]["updates"]
        assert [update["lr"] for update in updates] == [0.5, 0.25]


@pytest.mark.parametrize("what", ["a rate", "an update", "the rows"])
async def test_an_audit_finds_updates_that_are_not_the_recorded_ones(what: str, bench: Open, tmp_path: Path) -> None:
    async with bench(tmp_path / "run", own_loop=True) as made, Session(made.loop) as session:
        await take(session, updates=2)
        (record,) = await made.store.steps("run")
        own = record.context["own_loop"]
        first, second = own["updates"]
        changed = {
            "a rate": {**own, "updates": [first, {**second, "lr": 0.125}]},
            "an update": {**own, "updates": [first]},
            "the rows": {"batch": "0" * 64, "updates": [{**each, "rows": "0" * 64} for each in (first, second)]},
        }[what]

        async def steps(run: str) -> list[StepRecord]:
            return [replace(record, context={**record.context, "own_loop": changed})]

        made.store.steps = steps
        problems = [finding.problem for finding in (await audit(made.store, "run")).findings]
        assert "its updates, their rates or their rows are not the recorded ones" in problems


async def test_it_goes_on_where_it_was_killed(bench: Open, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    async with bench(folder, own_loop=True) as made:

        async def killed() -> None:
            async with Session(made.loop) as session:
                await take(session)
                made.engine.crash_at = "update:1"
                await take(session)

        with pytest.raises(made.Crash):
            await killed()
        first = made.engine.ledger
    async with bench(folder, own_loop=True) as made, Session(made.loop) as session:
        assert (session.step, made.engine.ledger, made.policy.ledger) == (1, first, first)
        await take(session)
        assert len(made.engine.ledger) == 2
        assert (await audit(made.store, "run")).ok
        begun = await all_rollouts(made.store, "run", split="train", step=2)
        assert len(begun) == 16  # those of the step that was lost stay in the record
        used = {name for name, _ in (await made.store.last_step("run")).rollouts}
        assert all("~1/" in name for name in used)


async def test_parts_of_a_batch_and_several_calls_of_rollout_make_one_step(bench: Open, tmp_path: Path) -> None:
    async with bench(tmp_path / "run", own_loop=True) as made, Session(made.loop) as session:
        groups = await session.rollout(TASKS[:1], n=3) + await session.rollout([{"input": "more"}], n=2)
        assert [len(group.trajectories) for group in groups] == [3, 2]
        batch = await session.batch(groups)
        for row in batch.samples:
            await session.forward_backward(batch, [row])
        await session.optim_step()
        metrics = await session.publish()
        assert metrics["rollouts"] == 5.0
        assert (await audit(made.store, "run")).ok


async def test_older_rollouts_are_trained_where_the_setting_allows_them(bench: Open, tmp_path: Path) -> None:
    async with bench(tmp_path / "run", own_loop=True, trainer__max_staleness=1) as made:
        async with Session(made.loop) as session:
            old = await session.rollout(TASKS)
            await take(session)
            batch = await session.batch(old)
            await session.forward_backward(batch)
            await session.optim_step()
            assert (await session.publish())["staleness_max"] == 1.0
        assert (await audit(made.store, "run")).ok


def test_a_record_that_does_not_say_which_updates_were_taken_is_refused() -> None:
    """Also where Python leaves assertions out."""
    program = """if True:
        from lightning.errors import DataError
        from lightning_proof.recorded_step import own_step
        for said in "yes", [1], {"batch": "0"}, {"batch": "0", "updates": {}}, {"updates": [1]}:
            try:
                print(own_step({"own_loop": said}))
            except DataError as error:
                print(error)
    """
    ran = subprocess.run([sys.executable, "-O", "-c", program], capture_output=True, text=True, check=True)
    assert len(ran.stdout.splitlines()) == 5
    for line in ran.stdout.splitlines():
        assert line.startswith("the step's record does not say which updates its own loop took: ")
        assert line.endswith("Restore the database from a backup")
