"""Training on rollouts that were recorded: what a run copies, how old it says they are, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.algorithms.lightning_rl import LightningRL
from lightning.batch.trajectory import Group, Trajectory
from lightning.config import Config, load_config
from lightning.errors import ConfigError
from lightning.plugins import plugins
from lightning.trainer.algorithm import AlgorithmSchedule
from lightning.trainer.samplers import Asked
from lightning.trainer.training_data import all_rollouts
from lightning.types import (
    POLICY,
    SERVED,
    Caller,
    Outcome,
    Rollout,
    Run,
    Status,
    Task,
    Transition,
    VersionRun,
    logprobs,
    token_ids,
)
from lightning_finetuning.dpo import DPO
from lightning_finetuning.sft import SFT
from lightning_proof.audit import audit
from lightning_samplers.recorded import Record, RecordedSampler, ages, check_record, open_record, own_call

WHITENED = LightningRL("reinforce++", group_size=1)


def of(record: Record) -> dict[str, Any]:
    """What a bench is given so that its run is trained on a record."""
    sampler = RecordedSampler(Asked(Config(), AlgorithmSchedule.of(WHITENED), recorded=record.place))
    sampler.held = record
    return {"sampler": sampler, "record": record.described(), "train": record.tasks}


async def conversations(folder: Path, rewards: list[float | None], *, version: int = 0, policy: str = POLICY) -> Path:
    """A store with one served conversation for each reward; None was not rated."""
    folder.mkdir(exist_ok=True)
    store = plugins().store(f"sqlite:///{folder / 'lightning.db'}")
    await store.open()
    try:
        await store.put_run(Run("session", "shell"))
        for number, reward in enumerate(rewards):
            rollout = Rollout(f"served-{number}", "session", Task(f"ask {number}"), f"g{number}", split=SERVED)
            await store.create_rollouts([rollout])
            (lease,) = await store.lease("session", "server")
            ids, lps = token_ids([number + 1, 2, 3]), logprobs([-0.5, -0.25, -1.0])
            runs = (VersionRun(0, version, policy), VersionRun(2, version + 1, policy))[: 1 + number % 2]
            await store.append([Transition(rollout.id, 1, 0, f"id-{number}", token_ids([9]), ids, lps, versions=runs)])
            if reward is not None:
                await store.complete(rollout.id, lease.attempt, Outcome(reward=reward))
    finally:
        await store.close()
    return folder


async def test_a_run_s_own_rollouts_train_another_run(bench, tmp_path: Path) -> None:
    async with bench(tmp_path / "source") as source:
        await source.loop.run({})
        before = await all_rollouts(source.store, "run", split="train")
    async with open_record(str(tmp_path / "source"), None, "default") as record:
        assert {rollout.id for rollout in record.rollouts} == {each.id for each in before}, "held-out ones are no data"
        async with bench(tmp_path / "copy", **of(record)) as copy:
            called = len(copy.policy.fake.requests)
            await copy.loop.sampling().step(1)
            assert len(copy.policy.fake.requests) == called, "no agent runs for a step"
            await copy.loop.run({})
            assert copy.engine.ledger, "something was learned"
            report = await audit(copy.store, "run", copy.loop.schedule.at(1))
            assert report.ok, report.findings
            assert report.rollouts == sum(len(record.rollouts) for record in await copy.store.steps("run"))
            records = await copy.store.steps("run")
            assert records[-1].metrics["recorded_share"] == 1.0
            assert records[0].metrics["staleness_max"] == 3, (
                "the oldest tokens are of version 0, the newest version is 3"
            )
            copies = await all_rollouts(copy.store, "run", split="train")
            assert sorted((each.task.id, each.reward) for each in copies) == sorted(
                (each.task.id, each.reward) for each in before
            )
            one = next(each for each in before if each.reward == copies[0].reward and each.task == copies[0].task)
            async with open_record(str(tmp_path / "source"), None, "default") as again:
                theirs = [call.response_ids for call in await again.store.transitions(one.id)]
            assert len(theirs) == len(await copy.store.transitions(copies[0].id))


@pytest.mark.parametrize("crash", ["step:1", "weights:1"])
async def test_a_crash_changes_nothing_of_what_is_trained(bench, tmp_path: Path, crash: str) -> None:
    source = await conversations(tmp_path / "source", [float(number % 3) for number in range(8)])
    async with open_record(str(source), None, "default") as record:
        async with bench(tmp_path / "whole", **of(record), algorithm=WHITENED) as whole:
            await whole.loop.run({})
            expected = whole.engine.ledger
        async with bench(tmp_path / "broken", **of(record), algorithm=WHITENED) as broken:
            broken.engine.crash_at = crash
            with pytest.raises(broken.Crash):
                await broken.loop.run({})
        async with bench(tmp_path / "broken", **of(record), algorithm=WHITENED) as resumed:
            await resumed.loop.run({})
            assert resumed.engine.ledger == expected
            assert (await audit(resumed.store, "run")).ok


async def test_copies_that_a_crash_left_are_not_run_by_agents(bench, tmp_path: Path) -> None:
    source = await conversations(tmp_path / "source", [1.0, 0.0, 1.0, 0.0])
    async with open_record(str(source), None, "default") as record:
        async with bench(tmp_path / "run", **of(record), algorithm=WHITENED) as one:
            sampler = one.loop.sampling()
            units = sampler._units(1)
            left = [
                Rollout(f"run/1/{place}/0", "run", unit[0].task, f"run/1/{place}", 1, max_attempts=2)
                for place, unit in enumerate(units)
            ]
            await one.store.create_rollouts(left)
            await one.store.lease("run", "run/recorded", limit=1, ttl=600)
        async with bench(tmp_path / "run", **of(record), algorithm=WHITENED) as two:
            await two.loop.run({})
            calls = [
                await two.store.transitions(each.id) for each in await all_rollouts(two.store, "run", split="train")
            ]
            assert all(call.id.startswith("id-") for made in calls for call in made), "each is a copy"


async def test_the_record_is_what_it_was_when_the_run_began(tmp_path: Path) -> None:
    source = await conversations(tmp_path / "source", [1.0, None, 0.0])
    async with open_record(str(source), None, "default") as record:
        assert ([each.reward for each in record.rollouts], record.unrated) == ([1.0, 0.0], 1)
        pinned = record.described()
        await record.store.complete("served-1", 1, Outcome(reward=0.5))
    async with open_record(str(source), pinned, "default") as record:
        assert [each.reward for each in record.rollouts] == [1.0, 0.0]
    async with open_record(str(source), None, "default") as record:
        assert len(record.rollouts) == 3
    lost = {**pinned, "rollouts": ["served-0", "gone"]}
    with pytest.raises(ConfigError, match=r"no longer has 1 rollout .* such as gone"):
        async with open_record(str(source), lost, "default"):
            pass


async def test_what_teaches_nothing_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    source = await conversations(tmp_path / "source", [1.0, 0.0, 0.5])
    async with open_record(str(source), None, "default") as record:
        for algorithm in (LightningRL("grpo"), DPO()):
            with pytest.raises(ConfigError, match="no task was recorded twice"):
                await check_record(record, AlgorithmSchedule.of(algorithm), (), "exclude")
        for algorithm in (SFT(threshold=0.5), WHITENED):
            await check_record(record, AlgorithmSchedule.of(algorithm), (), "exclude")
        with pytest.raises(ConfigError, match="look at the rewards"):
            await check_record(record, AlgorithmSchedule.of(SFT(threshold=2.0)), (), "exclude")


async def test_places_without_rated_rollouts_say_what_is_missing(tmp_path: Path) -> None:
    source = await conversations(tmp_path / "source", [None, None])
    with pytest.raises(ConfigError, match="2 conversations wait for feedback"):
        async with open_record(str(source), None, "default"):
            pass
    for place, project, said in ((f"{source}#other", "default", "no run other"), (str(source), "team", "'team'")):
        with pytest.raises(ConfigError, match=said):
            async with open_record(place, None, project):
                pass
    with pytest.raises(ConfigError, match="there is no database"):
        async with open_record(str(tmp_path / "nowhere"), None, "default"):
            pass


async def test_age_is_counted_from_the_newest_version_and_grows_with_steps(tmp_path: Path) -> None:
    source = await conversations(tmp_path / "source", [1.0, 0.0], version=4)
    async with open_record(str(source), None, "default") as record:
        assert set(record.newest.values()) == {5}
        calls = [await record.store.transitions(each.id) for each in record.rollouts]
    members = [
        Trajectory(each, tuple(made), (True,) * len(made)) for each, made in zip(record.rollouts, calls, strict=True)
    ]
    found = ages(2, [Group("g", tuple(members))], record.newest)
    assert found == {"staleness_mean": pytest.approx(2 + 5 / 6), "staleness_max": 3.0}, "5 of 6 tokens are one older"
    assert ages(2, [], {}) == {}, "of no tokens no age is known"


def test_groups_are_of_one_task_and_at_most_so_large() -> None:
    rollouts = [
        Rollout(f"r{number}", "run", Task(number % 2), "g", reward=1.0, status=Status.SUCCEEDED) for number in range(7)
    ]
    groups = Record(None, "here", tuple(rollouts), {}).groups(3)  # type: ignore[arg-type]
    assert [[each.id for each in group] for group in groups] == [["r0", "r2", "r4"], ["r6"], ["r1", "r3", "r5"]]


async def test_a_pass_has_each_recorded_rollout_once(bench, tmp_path: Path) -> None:
    source = await conversations(tmp_path / "source", [float(number % 2) for number in range(5)])
    async with (
        open_record(str(source), None, "default") as record,
        bench(tmp_path / "run", **of(record), algorithm=WHITENED, trainer__steps=6) as run,
    ):
        await run.loop.run({})
        known = await all_rollouts(run.store, "run", split="train")
        steps = [[each.task.id for each in known if each.step == number] for number in range(1, 7)]
        shares = [step.metrics["recorded_share"] for step in await run.store.steps("run")]
    assert [len(step) for step in steps] == [2, 2, 1] * 2
    for passed in (steps[:3], steps[3:]):
        assert len({task for step in passed for task in step}) == 5
    assert shares == [0.4, 0.8, 1.0, 1.0, 1.0, 1.0]


async def test_recorded_calls_of_several_policies_train_the_policies_of_the_run(bench, tmp_path: Path) -> None:
    source = await conversations(tmp_path / "source", [1.0, 0.0, 1.0, 0.0], policy="poet")
    async with open_record(str(source), None, "default") as record:
        async with bench(tmp_path / "run", **of(record), algorithm=WHITENED) as one:
            await one.loop.run({})
            copies = await all_rollouts(one.store, "run", split="train")
            calls = [call for each in copies for call in await one.store.transitions(each.id)]
            assert {call.policy for call in calls} == {"policy"}
        (call, *_) = await record.store.transitions("served-1")
    settings = ('policies.writer.agents=["agent"]', 'policies.judge.models=["gpt-*"]', "engine.lora.rank=2")
    several = plugins().policy_set(load_config(overrides=settings, env={}))
    assert [run.policy for run in own_call(replace(call, caller=Caller("agent")), several).versions] == ["writer"] * 2
    assert own_call(replace(call, caller=Caller("other")), several).policy == "base"
    twice = replace(call, caller=Caller("agent"), requested_model="gpt-4o")
    with pytest.raises(ConfigError, match=r"matches policies.writer and policies.judge, and a call has one policy"):
        own_call(twice, several)


async def test_a_record_is_tried_with_the_policies_of_the_run(tmp_path: Path) -> None:
    settings = ('policies.writer.agents=["writer"]', "engine.lora.rank=2")
    several = plugins().policy_set(load_config(overrides=settings, env={}))
    source = await conversations(tmp_path / "source", [1.0, 0.0])
    async with open_record(str(source), None, "default") as record:
        schedule = AlgorithmSchedule.of(WHITENED)
        await check_record(record, schedule, (), "exclude")
        with pytest.raises(ConfigError, match="finds nothing to learn"):  # its agent has no policy in the run
            await check_record(record, schedule, ("!policy:base",), "exclude", several)
