"""A run is read as it was: which call followed which, what of it was new, what was trained."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import pytest
from lightning.errors import DataError
from lightning.planning.calibration import calibrate
from lightning.planning.planner import replay
from lightning.planning.recorded import _Reader, read_run
from lightning.plugins import plugins
from lightning.store.protocol import Store
from lightning.trainer.publishing import HELD
from lightning.types import Outcome, Rollout, Run, StepRecord, Task

from .conftest import CALL, GROUP, LEAD, PLACES, STEPS, TASKS, TOOL, TRAIN, call, record


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    store = plugins().store("memory://")
    await store.open()
    yield store
    await store.close()


async def test_calls_and_what_was_between_them(store: Store) -> None:
    await record(store)
    recorded = await read_run(store, "run")
    assert recorded.model == "models/tiny"
    assert (recorded.schedule.tasks_per_step, recorded.schedule.group_size) == (TASKS, GROUP)
    assert recorded.schedule.concurrency == PLACES
    assert [(group.step, group.teaches) for group in recorded.groups] == [
        (step, task == 0) for step in range(STEPS) for task in range(TASKS)
    ]
    first, second = recorded.groups[0].rollouts[1].calls
    assert (first.after, first.started - first.ready, first.ended - first.started) == (-1, LEAD, CALL)
    assert (second.after, second.started - second.ready, second.tools) == (0, TOOL, 2)
    # The sibling before has had the same prompt; the second call goes on from the first, its answer included.
    assert (first.prompt, first.fresh, first.response) == (4, 0, 10)
    assert (second.prompt, second.fresh, second.response) == (16, 2, 5)
    assert [call.fresh for call in recorded.groups[0].rollouts[0].calls] == [4, 2]
    assert [call.fresh for call in recorded.groups[1].rollouts[0].calls] == [1, 2], "but for its own question"


async def test_what_was_trained(store: Store) -> None:
    await record(store)
    recorded = await read_run(store, "run")
    assert [rollout.rows for rollout in recorded.groups[0].rollouts] == [21, 21], "one row: the longest call, answered"
    assert [rollout.rows for rollout in recorded.groups[1].rollouts] == [0, 0]
    assert [(step.rows, step.seconds["train"]) for step in recorded.steps] == [(42, TRAIN)] * STEPS


async def test_parallel_calls_follow_the_one_that_ended_before(store: Store) -> None:
    calls = [call("r", seq, at, [seq + 1], [5]) for seq, at in enumerate((0.0, 1.5, 1.75, 4.0))]
    reader = _Reader(store, [], [])
    rollout = reader._rollout(Rollout("r", "run", Task(1), "g", attempt=1, seconds=5.0), calls)
    assert [one.after for one in rollout.calls] == [-1, 0, 0, 2]


async def test_the_replay_of_a_run_without_noise_is_the_run(store: Store) -> None:
    await record(store)
    recorded = await read_run(store, "run")
    calibration = calibrate(recorded)
    played = replay(recorded, calibration)
    assert played.simulated.rollout == pytest.approx(played.recorded.rollout, rel=0.02)
    assert played.simulated.train == pytest.approx(TRAIN)
    assert (played.simulated.checkpoint, played.simulated.update) == (0.25, 0.5)
    assert abs(played.error) < 0.02


@pytest.mark.parametrize("seed", range(4))
async def test_no_rollout_takes_place_while_the_engine_trains(store: Store, seed: int) -> None:
    rng, agents, seconds = random.Random(seed), 12, list[float]()
    await store.put_run(Run("crowd", "crowd", {"config": {"trainer": {"tasks_per_step": 1}}}))
    for step in range(STEPS):
        names = [f"crowd/{step}/{index}" for index in range(agents)]
        made = [Rollout(name, "crowd", Task(1), f"crowd/{step}", step=step, index=n) for n, name in enumerate(names)]
        await store.create_rollouts(made)
        await store.lease("crowd", "worker", limit=agents)
        ended = []
        for name in names:
            # All begin at once, call once, and go on for a while, of which nothing is stored but the seconds of the whole.
            called = rng.uniform(0.5, 2.0)
            ended.append(called + CALL + rng.expovariate(1.0))
            await store.append([call(name, 0, 1000.0 * step + called, [1], [7])])
            await store.complete(name, 1, Outcome(reward=1.0, seconds=ended[-1]))
        seconds += ended
        groups, keys = (f"crowd/{step}",), tuple((name, 1) for name in names)
        await store.commit_step(StepRecord("crowd", step, step + 1, keys, ("d",) * agents, f"{step}", groups=groups))
        await store.log_metrics("crowd", step, {"seconds/rollout": max(ended), "seconds/train": TRAIN})
    recorded = await read_run(store, "crowd")
    for group, one in zip(recorded.groups, recorded.steps, strict=True):
        begun = min(rollout.start for rollout in group.rollouts)
        assert max(rollout.end for rollout in group.rollouts) - begun <= one.seconds["rollout"] + 1e-6
        for rollout in group.rollouts:
            assert rollout.start == rollout.calls[0].ready <= rollout.calls[0].started
        lasted = [rollout.end - rollout.start for rollout in group.rollouts]
        assert lasted == pytest.approx([seconds.pop(0) for _ in lasted], abs=1e-6), "each as long as it was"
    assert abs(replay(recorded, calibrate(recorded)).error) < 0.02


async def test_calls_before_an_interruption_stay_where_they_were(store: Store) -> None:
    await record(store)
    whole = await read_run(store, "run")
    # The step was sampled up to its last call before the trainer died: it says how long the rest took.
    await store.log_metrics("run", 1, {"seconds/rollout": 0.5})
    cut = await read_run(store, "run")
    assert cut.groups == whole.groups


async def test_how_long_calls_stood_still(store: Store) -> None:
    await record(store)
    assert calibrate(await read_run(store, "run")).costs.trainer.export == 0.0, "not recorded: all of the update"
    for step in range(STEPS):
        await store.log_metrics("run", step, {HELD: 0.125})
    trainer = calibrate(await read_run(store, "run")).costs.trainer
    assert (trainer.update, trainer.export) == (0.5, 0.375)


async def test_a_run_that_says_nothing_is_refused(store: Store) -> None:
    await store.put_run(Run("empty", "empty"))
    for run in ("empty", "nobody"):
        with pytest.raises(DataError, match="no committed step"):
            await read_run(store, run)


async def test_calls_that_were_pruned_are_missed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    await record(store)

    async def none(attempts: list[tuple[str, int]]) -> list[list[object]]:
        return [[] for _ in attempts]

    monkeypatch.setattr(store, "transitions_of", none)
    with pytest.raises(DataError, match="not in its store any more"):
        await read_run(store, "run")
