"""The loop against a scripted policy server: wherever it is cut, a resume ends where an undisturbed run does."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from lightning.errors import ConfigError, EngineError, PolicyServerError, RunnerError
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


each_place = pytest.mark.parametrize(
    "where", ["step:1", "save:2", "commit:2", "committed:2", "weights:2", "update:2", "evaluate:1", "weights:3"]
)
"""Where a run is cut."""


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint_every", [1, None])
@each_place
async def test_wherever_it_is_cut_a_resume_finishes_exactly_once(
    bench: Any, tmp_path: Path, where: str, checkpoint_every: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cut_and_resumed(bench, tmp_path, where, checkpoint_every, monkeypatch)


async def cut_and_resumed(
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
        supervisor = asyncio.create_task(made.loop.stack.look_after())
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
        made.loop.stack._supervisor = asyncio.create_task(made.loop.stack.look_after())
        made.policy.die_at, made.policy.restart_fails = 2, True
        async with asyncio.timeout(60):
            with pytest.raises(PolicyServerError, match="no memory for a restart"):
                await made.loop.run({})
    async with bench(tmp_path) as made:
        await made.loop.run({})
        await assert_finished(made)


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
