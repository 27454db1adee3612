"""A run is read as it was: which call followed which, what of it was new, what was trained."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from lightning.errors import DataError
from lightning.planning.calibration import calibrate
from lightning.planning.planner import replay
from lightning.planning.recorded import _Reader, read_run
from lightning.plugins import plugins
from lightning.store.protocol import Store
from lightning.types import Rollout, Run, Task

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
