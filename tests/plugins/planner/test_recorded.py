"""A run is read as it was: which call followed which, what of it was new, what was trained."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
from lightning import DPO, SFT
from lightning.algorithms.lightning_rl import LightningRL
from lightning.algorithms.protocol import Algorithm
from lightning.config import Config, with_settings
from lightning.credit import per_agent
from lightning.errors import DataError
from lightning.losses.correction import Correction
from lightning.losses.protocol import StepLoss, needs_reference
from lightning.plugins import plugins
from lightning.store.protocol import Store
from lightning.trainer.runs import describe_algorithm
from lightning.trainer.weight_sync import HELD_SECONDS
from lightning.types import Outcome, Rollout, Run, StepRecord, Task
from lightning_credits.critic import Critic
from lightning_planner.calibration import calibrate
from lightning_planner.cluster import GPUS, Cluster
from lightning_planner.costs import Schedule
from lightning_planner.planner import Target, make_plan, replay
from lightning_planner.recorded import Recorded, _Reader, forward_passes, read_run, recorded_config
from lightning_planner.shape import read_shape

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
        (step, task == 0) for step in range(1, STEPS + 1) for task in range(TASKS)
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
    for step in range(1, STEPS + 1):
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
        await store.commit_step(StepRecord("crowd", step, step, keys, ("d",) * agents, f"{step}", groups=groups))
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
    for step in range(1, STEPS + 1):
        await store.log_metrics("run", step, {HELD_SECONDS: 0.125})
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


def recorded_with(**config: object) -> Recorded:
    return Recorded("run", "model", Schedule(1, 1, 1), (), (), config)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("algorithm", "passes"),
    [
        (LightningRL(), 0),
        (LightningRL(kl_coefficient=0.01), 1),
        (LightningRL("gspo"), 1),
        (LightningRL("gspo", kl_coefficient=0.01), 2),
        (LightningRL("gspo", correction="tis"), 0),
        (LightningRL("grpo", correction=Correction(level="geometric")), 1),
        (LightningRL("ppo", kl_coefficient=0.01), 2),
        (LightningRL("ppo", credit=Critic(lam=0.5)), 1),
        (DPO(), 2),
        (SFT(), 0),
    ],
)
def test_passes_before_the_gradients_are_those_of_the_recorded_algorithm(algorithm: Algorithm, passes: int) -> None:
    assert forward_passes(recorded_with(algorithm=describe_algorithm(algorithm))) == passes
    loss, head = algorithm.loss, bool(getattr(algorithm, "head", ""))
    assert isinstance(loss, StepLoss) + needs_reference(loss) + head == passes, "as the engines decide it"


@dataclass(frozen=True)
class OwnCritic(Critic):
    """A user's, which says so on its class alone."""


def test_passes_of_an_algorithm_that_is_not_known_are_not_guessed() -> None:
    assert forward_passes(recorded_with()) is None
    assert forward_passes(recorded_with(algorithm={"name": "mine", "arguments": {"low_level": "grpo"}})) is None
    assert forward_passes(recorded_with(algorithm={"name": "lightning_rl", "arguments": None})) is None
    own: Any = type("Own", (), {"__call__": lambda *_: []})()
    for credit in (own, lambda group, advantage: [], partial(per_agent), OwnCritic()):
        algorithm = describe_algorithm(LightningRL(credit=credit, kl_coefficient=0.1))
        assert forward_passes(recorded_with(algorithm=algorithm)) is None, "it may be a critic"
    ours = LightningRL(credit=per_agent, kl_coefficient=0.1)
    assert forward_passes(recorded_with(algorithm=describe_algorithm(ours))) == 1


async def test_a_plan_for_gpus_has_the_passes_of_the_recorded_algorithm(store: Store) -> None:
    await record(store)
    recorded = await read_run(store, "run")
    target = Target(
        recorded.schedule, Config(), shape=read_shape("Qwen/Qwen3-4B"), cluster=Cluster(GPUS["h100"], 8, serving=4)
    )
    named = {
        name: replace(recorded, config={"algorithm": described})
        for name, described in {
            "grpo": describe_algorithm(LightningRL()),
            "kl": describe_algorithm(LightningRL(kl_coefficient=0.01)),
            "unknown": {"name": "mine"},
        }.items()
    }
    plans = {name: make_plan(one, calibrate(one), target) for name, one in named.items()}
    assert plans["kl"].costs.trainer.row_token > plans["grpo"].costs.trainer.row_token
    assert [
        name for name, plan in plans.items() if any("does not say what the algorithm" in one for one in plan.notes)
    ] == ["unknown"]


def test_settings_that_are_tables_are_those_of_the_recorded_run() -> None:
    own = with_settings(Config(), {"engine.verl.sharding": {"fsdp_size": 2}, "engine.lora.rank": 4, "engine.lr": 1.0})
    read = recorded_config(recorded_with(config=own.model_dump(mode="json")).config)
    assert read.engine.verl.sharding == {"fsdp_size": 2}
    assert read == own
