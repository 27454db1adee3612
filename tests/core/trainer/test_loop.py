"""The loop against a scripted policy server: wherever it is cut, a resume ends where an undisturbed run does."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from lightning import DPO
from lightning.algorithms import Batch, from_batch
from lightning.algorithms.lightning_rl import LightningRL
from lightning.batch.trajectory import Group
from lightning.errors import AuditError, ConfigError, EngineError, PolicyServerError, RunnerError
from lightning.testing.fake_vllm import Reply
from lightning.trainer.summary import summarize
from lightning.types import Task

STEPS = 3


async def assert_finished(made: Any) -> None:
    steps = await made.store.steps("run")
    assert [record.step for record in steps] == list(range(1, STEPS + 1))
    assert len(made.engine.ledger) == sum(bool(step.rollouts) for step in steps), "what taught is in the weights once"
    assert made.policy.ledger == made.engine.ledger, "the policy server has the trained weights"
    assert made.policy.version == STEPS


async def test_a_run_from_start_to_end(bench: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with bench(tmp_path, engine__warmup_steps=STEPS + 1) as made:
        await made.loop.run({"seconds/start": 1.0})
        assert "engine.warmup_steps = 4 is more than trainer.steps = 3" in caplog.text
        await assert_finished(made)
        digest = hashlib.sha256(json.dumps(made.policy.ledger).encode()).hexdigest()
        assert await made.loop.publisher.digest() == digest, "that of the weights which are served"
        summary = await summarize(made.store, "run")
        points = [point.values for point in await made.store.metrics("run") if "seconds/update" in point.values]
    # Before calls stand still the weights are written.
    assert all(0.0 < values["held_seconds"] < values["seconds/update"] for values in points), points
    assert len(points) == STEPS
    assert [result.step for result in summary.evaluations] == [0, 1, 2, 3]
    assert (summary.steps, summary.rollouts, summary.failed, summary.drift_tokens) == (STEPS, STEPS * 8, 0, 0)
    assert summary.time["start"] == 1.0
    assert summary.time["rollout"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint_every", [1, 2, None])
@pytest.mark.parametrize(
    "where", ["step:1", "save:2", "commit:2", "committed:2", "weights:2", "update:2", "evaluate:1", "weights:3"]
)
async def test_wherever_it_is_cut_a_resume_finishes_exactly_once(
    bench: Any, tmp_path: Path, where: str, checkpoint_every: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(tmp_path, trainer__checkpoint_every=checkpoint_every) as made:
        made.engine.crash_at = where
        if where.startswith("update"):
            made.policy.crash_at = 2
        _crash_in_store(made, where, monkeypatch)
        try:
            await made.loop.run({})
        except made.Crash:
            pass
        else:
            assert where == "save:2", "every other place is passed"
            assert checkpoint_every != 1
        committed = await made.store.steps("run")
    monkeypatch.undo()
    async with bench(tmp_path, trainer__checkpoint_every=checkpoint_every) as made:
        await made.loop.run({})
        await assert_finished(made)
        assert (await made.store.steps("run"))[: len(committed)] == committed


def _crash_in_store(made: Any, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, _, step = where.partition(":")
    commit, evaluate = made.store.commit_step, made.loop.evaluate

    async def commit_step(record: Any) -> None:
        if kind == "commit" and record.step == int(step):
            raise made.Crash(where)
        await commit(record)
        if kind == "committed" and record.step == int(step):
            raise made.Crash(where)

    async def evaluation() -> Any:
        if kind == "evaluate" and made.loop.done == int(step):
            raise made.Crash(where)
        return await evaluate()

    monkeypatch.setattr(made.store, "commit_step", commit_step)
    monkeypatch.setattr(made.loop, "evaluate", evaluation)


@pytest.mark.slow
async def test_a_finished_run_is_not_trained_again(bench: Any, tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        await made.loop.run({})
        before = await made.store.steps("run")
    async with bench(tmp_path) as made:
        await made.loop.run({})
        assert await made.store.steps("run") == before
        await assert_finished(made)


async def test_a_changed_store_cannot_be_replayed(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench(tmp_path, trainer__checkpoint_every=3) as made:
        made.policy.crash_at = 2
        with pytest.raises(made.Crash):
            await made.loop.run({})
    async with bench(tmp_path, trainer__checkpoint_every=3) as made:
        honest = made.store.transitions_of

        async def tampered(attempts: Sequence[tuple[str, int]]) -> Any:
            calls = await honest(attempts)
            for call in [call for calls_of_one in calls for call in calls_of_one]:
                call.response_ids[0] += 1
            return calls

        monkeypatch.setattr(made.store, "transitions_of", tampered)
        with pytest.raises(AuditError, match="cannot be replayed"):
            await made.loop.run({})


async def test_failed_rollouts_are_counted_and_the_rest_is_trained(bench: Any, answering: Any, tmp_path: Path) -> None:
    begun = itertools.count()

    async def sometimes(task: Task, llm: Any) -> float:
        bad = next(begun) % 3 == 0
        reward = await answering(task, llm)
        if bad:
            raise ValueError("a bad day")
        return reward

    async with bench(tmp_path, sometimes) as made:
        await made.loop.run({})
        summary = await summarize(made.store, "run")
        assert summary.steps == STEPS
        assert 0 < summary.failed < summary.rollouts
        trained = {name for record in await made.store.steps("run") for name, _ in record.rollouts}
        page = await made.store.list_rollouts("run", split="train")
        assert all(rollout.reward is not None for rollout in page.items if rollout.id in trained)


async def test_when_every_rollout_fails_the_first_error_is_shown(bench: Any, tmp_path: Path) -> None:
    def broken(task: Task, llm: Any) -> float:
        raise ValueError("no such table: pens")

    async with bench(tmp_path, broken) as made:
        made.loop.val = []
        with pytest.raises(RunnerError, match=r"rollouts of step 1: all 8 failed.*no such table: pens"):
            await made.loop.run({})


@pytest.mark.slow
async def test_a_step_that_failed_as_a_whole_is_tried_again_on_resume(bench: Any, tmp_path: Path) -> None:
    def broken(task: Task, llm: Any) -> float:
        raise ValueError("the database is down")

    async with bench(tmp_path, broken) as made:
        made.loop.val = []
        with pytest.raises(RunnerError):
            await made.loop.run({})
    async with bench(tmp_path) as made:
        await made.loop.run({})
        await assert_finished(made)
        summary = await summarize(made.store, "run")
    assert summary.failed == 8, "the first try is still counted"
    assert summary.rollouts == (STEPS + 1) * 8


@pytest.mark.slow
async def test_an_evaluation_that_the_agent_failed_is_a_result_without_a_reward(
    bench: Any, answering: Any, tmp_path: Path
) -> None:
    async def helpless(task: Task, llm: Any) -> float:
        reward = await answering(task, llm)
        if str(task.input).startswith("held out"):
            raise ValueError("too hard")
        return reward

    async with bench(tmp_path, helpless) as made:
        await made.loop.run({})
        await assert_finished(made)
        summary = await summarize(made.store, "run")
    assert [result.reward for result in summary.evaluations] == [None] * 4, "never a reward of 0"
    assert [result.failed for result in summary.evaluations] == [3] * 4


@pytest.mark.slow
async def test_an_evaluation_lost_to_the_infrastructure_is_an_error_and_is_tried_again(
    bench: Any, tmp_path: Path
) -> None:
    async with bench(tmp_path) as made:
        made.policy.fake.default = Reply(status=500, message="out of memory")
        made.policy.fake.script = None
        with pytest.raises(RunnerError, match="held-out tasks after 0 steps: all 3 failed"):
            await made.loop.run({})
    async with bench(tmp_path) as made:
        await made.loop.run({})
        await assert_finished(made)
        summary = await summarize(made.store, "run")
    assert [result.failed for result in summary.evaluations] == [0, 0, 0, 0]
    assert [result.rollouts for result in summary.evaluations] == [3, 3, 3, 3]


@pytest.mark.slow
@pytest.mark.parametrize("gap", [25.0, float("nan")])
async def test_a_server_that_does_not_serve_the_trained_weights_is_an_error(
    bench: Any, tmp_path: Path, gap: float
) -> None:
    async with bench(tmp_path) as made:
        made.policy.gap = gap
        with pytest.raises(PolicyServerError, match=r"trained weights.*resuming does not help: .*lightning doctor"):
            await made.loop.run({})
    async with bench(tmp_path) as made:
        await made.loop.run({})
        await assert_finished(made)


async def test_a_server_that_missed_the_weights_once_is_given_them_again(
    bench: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with bench(tmp_path, trainer__steps=1) as made:
        update, given = made.policy.update, []

        async def deaf_at_first(weights: Path, version: int, probe: Any = None) -> Any:
            given.append(version)
            made.policy.gap = 25.0 if len(given) == 1 else 0.0
            return await update(weights, version, probe)

        made.policy.update = deaf_at_first
        await made.loop.run({})
        assert given == [1, 1]
        assert "differ from the trainer's by 25 nats in the mean" in caplog.text
        assert "it is given the weights once more" in caplog.text


@pytest.mark.slow
async def test_a_server_that_dies_during_an_update_is_restarted_and_updated(bench: Any, tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        supervisor = asyncio.create_task(made.loop.stack.supervise())
        made.loop.stack._supervisor = supervisor
        made.policy.die_at = 2
        await made.loop.run({})
        assert made.loop.stack.restarts == 1
        assert made.policy.restarted_with == 1
        await assert_finished(made)
        supervisor.cancel()


@pytest.mark.slow
async def test_a_restart_that_fails_during_an_update_ends_the_run_with_its_own_error(
    bench: Any, tmp_path: Path
) -> None:
    async with bench(tmp_path) as made:
        made.loop.stack._supervisor = asyncio.create_task(made.loop.stack.supervise())
        made.policy.die_at, made.policy.restart_fails = 2, True
        async with asyncio.timeout(60):
            with pytest.raises(PolicyServerError, match="no memory for a restart"):
                await made.loop.run({})
    async with bench(tmp_path) as made:
        await made.loop.run({})
        await assert_finished(made)


async def test_a_crash_between_a_commit_and_its_checkpoint_is_replayed(bench: Any, tmp_path: Path) -> None:
    """Checkpoints are written beside the sampling of the next step: the store has a step before its checkpoint is on disk."""
    async with bench(tmp_path, trainer__checkpoint_every=1) as made:
        made.engine.crash_at = "save:2"
        with pytest.raises(made.Crash):
            await made.loop.run({})
        assert len(await made.store.steps("run")) == 2
        assert made.loop.checkpoints.steps() == [1]
    async with bench(tmp_path, trainer__checkpoint_every=1) as made:
        await made.loop.restore()
        assert len(made.engine.ledger) == 2
        assert made.loop.writer.unsaved
        await made.loop.run({})
        await assert_finished(made)


async def test_a_run_that_is_told_to_stop_saves_what_it_has_learned(bench: Any, tmp_path: Path) -> None:
    async with bench(tmp_path, trainer__checkpoint_every=100) as made:
        sample = made.loop.evaluate

        async def stopped() -> None:
            if made.loop.done == 2:
                raise asyncio.CancelledError
            await sample()

        made.loop.evaluate = stopped
        with pytest.raises(asyncio.CancelledError):
            await made.loop.run({})
        assert made.loop.checkpoints.steps() == [2]
        assert made.policy.ledger == made.engine.ledger
    async with bench(tmp_path, trainer__checkpoint_every=100) as made:
        await made.loop.run({})
        await assert_finished(made)


async def test_what_stops_in_the_middle_of_training_is_not_saved(bench: Any, tmp_path: Path) -> None:
    """The engine's thread goes on: nobody knows what it has."""
    async with bench(tmp_path, trainer__checkpoint_every=100) as made:
        step = made.engine.step

        def interrupted(*args: Any) -> Any:
            if len(made.engine.ledger) == 1:
                raise asyncio.CancelledError
            return step(*args)

        made.engine.step = interrupted
        with pytest.raises(asyncio.CancelledError):
            await made.loop.run({})
        assert made.loop.checkpoints.steps() == []


async def test_a_checkpoint_that_cannot_be_written_ends_the_run(bench: Any, tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        made.loop.writer._save = Mock(
            side_effect=EngineError("cannot write step-00000001: no space. Is the disk full?")
        )
        with pytest.raises(EngineError, match="Is the disk full"):
            await made.loop.run({})
        assert len(made.engine.ledger) == 1


async def test_checkpoints_that_the_store_does_not_know_are_never_deleted(bench: Any, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "step-00000007"
    folder.mkdir(parents=True)
    async with bench(tmp_path) as made:
        with pytest.raises(ConfigError, match="checkpoints of a run that this store does not know"):
            await made.loop.run({})
    assert folder.is_dir()


async def test_only_the_named_agents_are_trained(bench: Any, tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        made.loop.train_agents = ("somebody else",)
        await made.loop.run({})
        records = await made.store.steps("run")
        assert [record.rollouts for record in records] == [()] * STEPS


async def test_a_loss_of_the_batch_itself_trains_it_also_when_it_is_replayed(
    bench: Any, answering: Any, tmp_path: Path
) -> None:
    async def agent(task: Any, llm: Any) -> float:
        return float(await answering(task, llm)) + random.Random(llm.api_key).random()

    settings = {"algorithm": DPO(group_size=2), "trainer__steps": 3, "trainer__checkpoint_every": 10}
    async with bench(tmp_path, agent, **settings) as made:
        made.policy.crash_at = 2
        with pytest.raises(made.Crash):
            await made.loop.run({})
        trained = [loss.pairs for loss in made.engine.losses]
    async with bench(tmp_path, agent, **settings) as made:
        await made.loop.run({})
        again = [loss.pairs for loss in made.engine.losses]
    assert all(trained)
    assert len(again) == 3
    assert again[: len(trained)] == trained


@from_batch
def passed_on(groups: Sequence[Group], *, group_size: int = 4) -> Batch:
    """Another algorithm's rows, under a name of its own."""
    return LightningRL("gspo", group_size=group_size, kl_coefficient=0.5).batch(groups)


async def test_rows_that_another_algorithm_made_have_its_loss_also_when_they_are_replayed(
    bench: Any, tmp_path: Path
) -> None:
    settings = {"algorithm": passed_on(), "trainer__steps": 2, "trainer__checkpoint_every": 10}
    asked_for = LightningRL("gspo", kl_coefficient=0.5).loss
    async with bench(tmp_path, **settings) as made:
        made.policy.crash_at = 1
        with pytest.raises(made.Crash):
            await made.loop.run({})
        assert made.engine.losses == [asked_for]
    async with bench(tmp_path, **settings) as made:
        await made.loop.run({})
        assert made.engine.losses == [asked_for] * 2
