"""What training makes of rollouts that the policy itself failed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from lightning.algorithms.lightning_rl import LightningRL
from lightning.algorithms.presets import PRESETS, LowLevel
from lightning.batch.trajectory import Group
from lightning.config import Config
from lightning.engines.protocol import StepResult
from lightning.errors import ConfigError
from lightning.store.memory import MemoryStore
from lightning.testing.trajectories import make_trajectory
from lightning.trainer.metrics import step_metrics
from lightning.trainer.plan import is_lost, train_rollouts
from lightning.trainer.runs import describe_algorithm
from lightning.trainer.training_data import all_rollouts, load_groups
from lightning.types import Fault, Outcome, Rollout, Run, Task, Transition, logprobs, token_ids

ALGORITHM = LightningRL("grpo", group_size=4)
ENDS = (
    Outcome(reward=1.0),
    Outcome(reward=0.25),
    Outcome(fault=Fault.POLICY, error="max_turns (it did not end): over 5"),
    Outcome(fault=Fault.AGENT, error="KeyError: 'x'"),
)


async def store_of(*ends: Outcome, policy_fault: Any = None) -> tuple[MemoryStore, list[Rollout]]:
    """A run of one group, whose rollouts have one call each."""
    store = MemoryStore()
    await store.open()
    config: dict[str, Any] = {"algorithm": describe_algorithm(ALGORITHM), "train_agents": []}
    if policy_fault is not None:
        config["config"] = {"trainer": {"policy_fault": policy_fault}}
    await store.put_run(Run("run", "run", config))
    await store.create_rollouts(train_rollouts("run", 1, [Task("q")], len(ends), 2))
    for lease, end in zip(await store.lease("run", "worker", limit=8), ends, strict=True):
        number = lease.rollout.index
        ids = token_ids([1, 2]), token_ids([3, 4 + number]), logprobs([-0.5, -0.25])
        await store.append([Transition(lease.rollout.id, 1, 0, f"call-{number}", *ids)])
        await store.complete(lease.rollout.id, 1, end)
    return store, await all_rollouts(store, "run", split="train", step=1)


def _rows(group: str, rewards: list[float], masked: int | None = None) -> Group:
    return Group(
        group,
        tuple(
            make_trajectory(rollout=f"{group}/{index}", reward=reward, trainable=(index != masked,))
            for index, reward in enumerate(rewards)
        ),
    )


@pytest.mark.parametrize("low_level", [name for name in PRESETS if name != "ppo"])
def test_a_masked_rollout_counts_in_mean_and_deviation(low_level: LowLevel) -> None:
    """It is compared with, and not trained: the others get what they would get if it were."""
    rewards, other = [1.0, 1.0, 1.0, 0.0], _rows("h", [1.0, 0.0, 1.0, 0.0])
    for groups in ([], [other]):
        found = LightningRL(low_level).batch([_rows("g", rewards, masked=3), *groups])
        whole = LightningRL(low_level).batch([_rows("g", rewards), *groups])
        kept = {row.spans[0].rollout: row.advantages.tolist() for row in whole.samples}
        del kept["g/3"]
        assert {row.spans[0].rollout: row.advantages.tolist() for row in found.samples} == kept
        assert len(kept) == 3 + 4 * len(groups)


def test_by_hand_under_reinforce_plus_plus() -> None:
    groups = [_rows("g", [1.0, 1.0, 1.0, 0.0], masked=3), _rows("h", [1.0, 0.0, 1.0, 0.0])]
    found = [float(row.advantages[-1]) for row in LightningRL("reinforce++").batch(groups).samples]
    assert found == pytest.approx([0.774, 0.774, 0.774, 0.774, -1.291, 0.774, -1.291], abs=1e-3)


def test_a_critic_says_nothing_of_a_masked_rollout() -> None:
    """Its advantage is not known, so it is in no normalisation."""
    valued = [
        Group(group.id, tuple(replace(member, values=(0.25,)) for member in group.trajectories))
        for group in (_rows("g", [1.0, 0.5, 0.0], masked=2), _rows("g", [1.0, 0.5]))
    ]
    masked, without = ([row.advantages.tolist() for row in LightningRL("ppo").batch([one]).samples] for one in valued)
    assert masked == without


async def test_two_solved_and_the_rest_never_ended_is_no_group_of_equals() -> None:
    store, rollouts = await store_of(ENDS[0], ENDS[0], ENDS[2], ENDS[2])
    assert ALGORITHM.batch(await load_groups(store, rollouts, (), "exclude")).skipped == {"all_rewards_equal": 1}
    groups = await load_groups(store, rollouts, (), 0.0)
    batch = ALGORITHM.batch(groups)
    assert not batch.skipped
    assert len(batch.used) == 4


async def test_rewards_are_shown_with_and_without_what_failed() -> None:
    store, rollouts = await store_of(*ENDS)
    groups = await load_groups(store, rollouts, (), 0.0)
    metrics = step_metrics(rollouts, groups, ALGORITHM.batch(groups), StepResult({}, {}))
    assert math.isclose(metrics["reward"], 0.625)
    assert math.isclose(metrics["reward_with_failures"], 1.25 / 4)
    assert (metrics["failed"], metrics["policy_fault/max_turns"]) == (2.0, 1.0)


async def test_a_step_whose_rollouts_the_policy_failed_is_not_lost() -> None:
    _, rollouts = await store_of(ENDS[2], ENDS[2])
    assert not is_lost(rollouts)
    _, rollouts = await store_of(ENDS[3], ENDS[3])
    assert is_lost(rollouts)


def test_the_setting_takes_a_number_or_a_word() -> None:
    assert Config().trainer.policy_fault == 0.0
    assert Config.model_validate({"trainer": {"policy_fault": "mask"}}).trainer.policy_fault == "mask"
    with pytest.raises((ConfigError, ValueError), match="policy_fault"):
        Config.model_validate({"trainer": {"policy_fault": "skip"}})
