"""Rollouts that go on while the engine trains: nothing is too old, nothing is lost, and a resume goes on exactly."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jwt
import pytest
from lightning.algorithms.lightning_rl import LightningRL
from lightning.config.sections import TrainerConfig
from lightning.errors import AuditError, RunnerError
from lightning.testing.fake_vllm import Reply
from lightning.trainer.context import Epoch
from lightning.trainer.plan import tasks_from
from lightning.trainer.summary import summarize
from lightning.trainer.training_data import all_rollouts
from lightning.types import Rollout, StepRecord, Task
from lightning_proof.audit import audit
from lightning_samplers.async_collection import Pipeline

STEPS = 6
PAIRS = LightningRL("grpo", group_size=2)
ASYNC: dict[str, Any] = {
    "algorithm": PAIRS,
    "trainer__steps": STEPS,
    "trainer__max_staleness": 2,
    "trainer__eval_every": 3,
}


@pytest.fixture
def slow(answering: Any) -> Any:
    """An agent whose rollouts take very different times, a few of them as long as many others."""
    rng = random.Random(11)

    async def agent(task: Any, llm: Any) -> float:
        await asyncio.sleep(min(0.002 * rng.paretovariate(0.8), 0.3))
        return float(await answering(task, llm))

    return agent


async def assert_whole(made: Any, bound: int = 2) -> list[StepRecord]:
    """Every step in the weights once, every group in one step, everything fresh enough, and an audit that agrees."""
    records: list[StepRecord] = await made.store.steps("run")
    rollouts = {rollout.id: rollout for rollout in await all_rollouts(made.store, "run", split="train")}
    assert [record.step for record in records] == list(range(1, STEPS + 1))
    assert len(made.engine.ledger) == sum(bool(record.rollouts) for record in records), "but those that taught nothing"
    assert made.policy.ledger == made.engine.ledger
    taken = [group for record in records for group in record.groups]
    assert len(taken) == len(set(taken))
    assert set(taken) == {rollout.group for rollout in rollouts.values()}, "nothing that was sampled is thrown away"
    begun = {rollout.group: rollout.step for rollout in rollouts.values()}
    for record in records:
        assert all(0 <= record.step - begun[group] <= bound for group in record.groups)
        ages = [record.metrics.get(f"staleness_{name}") for name in ("mean", "max")]
        assert ages == [None, None] if not record.rollouts else 0 <= (ages[0] or 0.0) <= (ages[1] or 0.0) <= bound
        for name, attempt in record.rollouts:
            for call in await made.store.transitions(name, attempt):
                assert begun[rollouts[name].group] <= call.version + 1 <= call.versions[-1].version + 1 <= record.step
    report = await audit(made.store, "run")
    assert report.ok, report.findings
    assert report.rederived
    return records


async def test_rollouts_go_on_while_the_engine_trains(bench: Any, slow: Any, tmp_path: Path) -> None:
    async with bench(tmp_path, slow, **ASYNC) as made:
        await made.loop.run({})
        records = await assert_whole(made)
        summary = await summarize(made.store, "run")
    assert all(len(record.groups) == 2 for record in records)
    assert max(record.metrics.get("staleness_max", 0.0) for record in records) > 0, (
        "some were sampled by older policies"
    )
    assert (summary.steps, summary.rollouts, summary.failed, summary.drift_tokens) == (STEPS, STEPS * 4, 0, 0)
    assert [result.step for result in summary.evaluations] == [0, 3, 6]
    assert [result.rollouts for result in summary.evaluations] == [3] * 3
    fresh = [record.metrics["max_logprob_gap"] for record in records if not record.metrics.get("staleness_max")]
    assert summary.max_logprob_gap == max(fresh, default=None), "what was learned since is no gap"


CUTS = ("begin:3", "begun:6", "ended:9", "step:1", "committed:3", "update:2", "evaluate:2")


@pytest.mark.slow
@pytest.mark.parametrize("where", CUTS)
async def test_wherever_it_is_killed_a_resume_keeps_the_bound_and_loses_nothing(
    bench: Any, slow: Any, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, _, number = where.partition(":")
    async with bench(tmp_path, slow, trainer__checkpoint_every=2, **ASYNC) as made:
        _kill(made, kind, int(number), monkeypatch)
        with pytest.raises(made.Crash):
            await made.loop.run({})
        committed = await made.store.steps("run")
        begun = await all_rollouts(made.store, "run", split="train")
    monkeypatch.undo()
    async with bench(tmp_path, slow, trainer__checkpoint_every=2, **ASYNC) as made:
        await made.loop.run({})
        records = await assert_whole(made)
        assert records[: len(committed)] == committed
        after = await all_rollouts(made.store, "run", split="train")
        assert [rollout.id for rollout in after[: len(begun)]] == [rollout.id for rollout in begun]
        tasks = [rollout.task.id for rollout in after if rollout.index == 0]
    order = tasks_from(made.loop.train, 0, len(tasks), 0)
    assert tasks == [task.id for task in order], "tasks come in their order, each once"


@pytest.mark.parametrize("staleness", [0, 1], ids=["in turns", "ahead"])
async def test_tasks_come_as_given_also_after_a_crash(
    bench: Any, answering: Any, tmp_path: Path, staleness: int
) -> None:
    given: dict[str, Any] = {"trainer__order": "given", "trainer__max_staleness": staleness, "trainer__eval_every": 0}
    async with bench(tmp_path, answering, **given) as made:
        made.engine.crash_at = "step:1"
        with pytest.raises(made.Crash):
            await made.loop.run({})
    async with bench(tmp_path, answering, engine__lr=1e-5, **given) as made:  # a config epoch of its own
        await made.loop.run({})
        assert len(made.loop.epochs) == 2
        train = [task.id for task in made.loop.train]
        begun = [
            rollout.task.id for rollout in await all_rollouts(made.store, "run", split="train") if not rollout.index
        ]
    assert begun == [*train, train[0]], "three steps of two tasks: every task of the five, then the first again"


async def test_an_epoch_that_was_replaced_before_a_step_leaves_no_place_in_the_tasks() -> None:
    """Each resume finds the groups that began before it; of the second one's tasks none has."""
    kept: dict[str, Any] = {}

    async def keep_state(run: str, key: str, value: int) -> int:
        return int(kept.setdefault(key, value))

    async def begins(tasks: list[str], begun: int, lr: float = 1e-5) -> list[str]:
        def config(names: list[str], lr: float) -> dict[str, Any]:
            trainer = {"order": "shuffled", "seed": 0, "tasks_per_step": 2}
            return {"config": {"trainer": trainer, "engine": {"lr": lr}}, "tasks": {"train": names}}

        found = Pipeline.__new__(Pipeline)
        found.stack = Mock(store=Mock(keep_state=keep_state))
        found.tasks, found.config = [Task("", id=name) for name in tasks], TrainerConfig()
        found.epochs, found._begun = [Epoch(0, 1, config(first, 1e-5)), Epoch(1, 3, config(tasks, lr))], begun
        await found._find_place(3)
        return [task.id for group in range(4) for task in _next_of(found, begun + group)]

    first, second, third = ([f"{name}{number}" for number in range(20)] for name in "abc")
    assert await begins(second, 4) == ["b0", "b14", "b3", "b13"]
    assert (await begins(second, 7))[0] == "b13", "three groups of these tasks have begun"
    assert (await begins(second, 7, lr=1e-4))[0] == "b13", "they are the same tasks"
    assert await begins(third, 7) == ["c16", "c4", "c5", "c3"]


def _next_of(pipeline: Pipeline, begun: int) -> list[Task]:
    pipeline._begun = begun
    return pipeline._next(1)


def _kill(made: Any, kind: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """End the process at the `number`-th event of a kind. What it holds is not given back, as after `kill -9`."""
    seen = 0

    def reached(this: str) -> None:
        nonlocal seen
        seen += this == kind
        if this == kind and seen == number:
            raise made.Crash(kind)

    create, commit, release = made.store.create_rollouts, made.store.commit_step, made.store.release
    evaluate, finished = made.loop.evaluate, made.loop.finished

    async def create_rollouts(rollouts: Sequence[Rollout]) -> int:
        reached("begin")
        count = await create(rollouts)
        reached("begun")
        return int(count)

    async def commit_step(record: StepRecord) -> None:
        reached("commit")
        await commit(record)
        reached("committed")

    async def evaluation() -> Any:
        reached("evaluate")
        return await evaluate()

    async def released(worker: str) -> int:
        return 0 if seen >= number else int(await release(worker))

    def ended(rollout: Rollout) -> None:
        reached("ended")
        finished(rollout)

    if kind == "step":
        made.engine.crash_at = f"step:{number}"
        seen = number - 1
    if kind == "update":
        made.policy.crash_at = number
    for owner, name, value in (
        (made.store, "create_rollouts", create_rollouts),
        (made.store, "commit_step", commit_step),
        (made.store, "release", released),
        (made.loop, "evaluate", evaluation),
        (made.loop, "finished", ended),
    ):
        monkeypatch.setattr(owner, name, value)


async def test_failed_rollouts_are_counted_and_the_rest_is_trained(bench: Any, slow: Any, tmp_path: Path) -> None:
    async def sometimes(task: Any, llm: Any) -> float:
        reward = await slow(task, llm)
        rollout = jwt.decode(llm.api_key, options={"verify_signature": False})["sub"]
        if (
            random.Random(rollout).random() < 0.3
        ):  # by its name: a key is another in each run, and all of a step may fail
            raise ValueError("a bad day")
        return float(reward)

    async with bench(tmp_path, sometimes, **ASYNC) as made:
        await made.loop.run({})
        records = await assert_whole(made)
        summary = await summarize(made.store, "run")
    assert 0 < summary.failed == sum(record.metrics["failed"] for record in records)


@pytest.mark.slow
async def test_when_every_rollout_fails_the_run_ends_and_a_resume_goes_on(
    bench: Any, slow: Any, tmp_path: Path
) -> None:
    def broken(task: Any, llm: Any) -> float:
        raise ValueError("no such table: pens")

    for _ in range(2):
        async with bench(tmp_path, broken, **ASYNC) as made:
            made.loop.val = []
            async with asyncio.timeout(60):
                with pytest.raises(RunnerError, match=r"rollouts for step 1: all 4 failed.*no such table: pens"):
                    await made.loop.run({})
    async with bench(tmp_path, slow, **ASYNC) as made:
        await made.loop.run({})
        records = await assert_whole(made)
    assert len(records[0].groups) > 2, "the first step took what had failed before it, beside its own"
    assert all(len(record.groups) == 2 for record in records[1:])


async def test_what_ends_the_sampler_ends_the_run(bench: Any, slow: Any, tmp_path: Path) -> None:
    async with bench(tmp_path, slow, **ASYNC) as made:

        async def run(lease: Any, llm: Any) -> Any:
            raise RunnerError("no process can be started")

        made.loop.stack.runner.run = run
        async with asyncio.timeout(60):
            with pytest.raises(RunnerError, match="no process can be started"):
                await made.loop.run({})


@pytest.mark.slow
async def test_a_server_that_dies_is_brought_back_under_the_agents(bench: Any, slow: Any, tmp_path: Path) -> None:
    async with bench(tmp_path, slow, **ASYNC) as made:
        made.loop.stack._supervisor = asyncio.create_task(made.loop.stack.look_after())
        made.policy.die_at = 2
        await made.loop.run({})
        await assert_whole(made)
        assert (made.loop.stack.restarts, made.policy.restarted_with) == (1, 1)
        made.loop.stack._supervisor.cancel()


@pytest.mark.slow
async def test_with_few_places_groups_begin_as_late_as_they_can(bench: Any, slow: Any, tmp_path: Path) -> None:
    """Two agents at once: waiting groups would grow old for nothing."""
    async with bench(tmp_path, slow, runner__concurrency=2, **ASYNC) as made:
        made.loop.val = []
        await made.loop.run({})
        records = await assert_whole(made)
    unfinished = max(record.metrics["pipeline/rollouts_unfinished"] for record in records)
    assert unfinished <= 3, "two that run, and one whose group has begun"


@pytest.mark.slow
async def test_dynamic_sampling_takes_groups_that_teach_nothing_without_counting_them(
    bench: Any, slow: Any, tmp_path: Path
) -> None:
    async def agent(task: Any, llm: Any) -> float:
        reward = await slow(task, llm)
        return 1.0 if str(task.input).endswith(("0", "1", "2")) else float(reward + random.Random(llm.api_key).random())

    dapo = LightningRL("dapo", group_size=2)
    async with bench(tmp_path, agent, trainer__max_waves=5000, **ASYNC | {"algorithm": dapo}) as made:
        await made.loop.run({})
        records = await assert_whole(made)
    dropped = [record.metrics["pipeline/groups_dropped"] for record in records]
    assert sum(dropped) > 0
    assert [len(record.groups) - 2 for record in records] == dropped
    used = [record.metrics["groups_used"] for record in records]
    assert used == [2] * STEPS, "each step has as many groups as it asks for"


@pytest.mark.slow
async def test_new_weights_do_not_wait_for_calls_in_flight(bench: Any, answering: Any, tmp_path: Path) -> None:
    """A call goes on with the new weights where the old ones stood, and its record says from which token on."""
    rng = random.Random(5)

    def script(body: Any) -> Reply:
        return Reply("word " * rng.choice([2, 40]), token_delay=0.01)

    async with bench(tmp_path, answering, script=script, **ASYNC) as made:
        made.loop.val = []
        await made.loop.run({})
        records = await assert_whole(made)
        attempts = [attempt for record in records for attempt in record.rollouts]
        calls = [call for calls in await made.store.transitions_of(attempts) for call in calls]
    split = [call for call in calls if len(call.versions) > 1]
    assert split, "no update fell into a call"
    for call in split:
        starts, versions = [run.start for run in call.versions], [run.version for run in call.versions]
        assert starts[0] == 0
        assert starts == sorted(set(starts))
        assert starts[-1] < len(call.response_ids)
        assert versions == list(range(versions[0], versions[-1] + 1))


async def _group_left_out(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that says it did not look at a group that it trained on."""
    trained = {rollout.id: rollout.group for rollout in await all_rollouts(made.store, "run", split="train")}

    def without_first(record: StepRecord) -> StepRecord:
        first = trained[record.rollouts[0][0]] if record.rollouts else ""
        return replace(record, groups=tuple(group for group in record.groups if group != first))

    await _change_record(made, monkeypatch, without_first)


async def _group_twice(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = (await made.store.steps("run"))[0].groups
    await _change_record(
        made,
        monkeypatch,
        lambda record: record if record.step == 1 else replace(record, groups=(*record.groups, first[0])),
    )


async def _later_step(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that was taken later than it says: its tokens are older than allowed."""
    await _change_record(made, monkeypatch, lambda record: replace(record, step=record.step + 3))


async def _change_record(made: Any, monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    changed = [change(record) for record in await made.store.steps("run")]

    async def steps(run: str) -> list[StepRecord]:
        return changed

    monkeypatch.setattr(made.store, "steps", steps)


@pytest.mark.slow
async def test_an_audit_finds_what_was_changed(
    bench: Any, slow: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(tmp_path, slow, **ASYNC) as made:
        await made.loop.run({})
        for tamper, problem in (
            (_group_left_out, "was trained, but is not the stored outcome"),
            (_group_twice, "taken already by step 1"),
            (_later_step, "not within trainer.max_staleness = 2 of step"),
        ):
            await tamper(made, monkeypatch)
            report = await audit(made.store, "run")
            assert any(problem in finding.problem for finding in report.findings), report.findings
            monkeypatch.undo()
        assert (await audit(made.store, "run")).ok


async def test_a_changed_record_cannot_be_replayed(bench: Any, slow: Any, tmp_path: Path, monkeypatch: Any) -> None:
    settings = {**ASYNC, "trainer__checkpoint_every": 10}
    async with bench(tmp_path, slow, **settings) as made:
        made.policy.crash_at = 3
        with pytest.raises(made.Crash):
            await made.loop.run({})
    async with bench(tmp_path, slow, **settings) as made:
        await _group_left_out(made, monkeypatch)
        with pytest.raises(AuditError, match="cannot be replayed"):
            await made.loop.run({})
