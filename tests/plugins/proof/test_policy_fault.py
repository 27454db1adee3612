"""Rollouts that failed by the policy's own fault are audited."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.trainer.training_data import all_rollouts, load_groups, record_step
from lightning.types import Fault
from lightning_proof.audit import audit

from tests.core.trainer.test_policy_fault import ALGORITHM, ENDS, store_of


@pytest.mark.parametrize(
    ("policy_fault", "rewards", "trained"),
    [
        ("exclude", [1.0, 0.25], [True, True]),
        ("mask", [1.0, 0.25, 0.0], [True, True, False]),
        (0.0, [1.0, 0.25, 0.0], [True, True, True]),
        (-1.0, [1.0, 0.25, -1.0], [True, True, True]),
    ],
)
async def test_each_setting_and_what_it_trains(policy_fault: Any, rewards: list[float], trained: list[bool]) -> None:
    store, rollouts = await store_of(*ENDS, policy_fault=policy_fault)
    (group,) = groups = await load_groups(store, rollouts, (), policy_fault)
    assert [member.reward for member in group.trajectories] == rewards
    assert [all(member.trainable) for member in group.trajectories] == trained
    batch = ALGORITHM.batch(groups)
    assert {rollout.index for rollout in batch.used} == {index for index, each in enumerate(trained) if each}
    await store.commit_step(record_step("run", 1, groups, batch, checkpoint="", metrics={}, context={}))
    assert (await audit(store, "run")).findings == ()
    kept = {
        rollout.index: (rollout.reward, rollout.fault)
        for rollout in await all_rollouts(store, "run", split="train", step=1)
    }
    assert kept[2] == (None, Fault.POLICY), "what is trained with is no reward that the agent has given"


async def test_an_audit_knows_the_setting_of_the_run() -> None:
    """A run of a release without the setting left such rollouts out."""
    store, rollouts = await store_of(*ENDS, policy_fault=None)
    groups = await load_groups(store, rollouts, (), 0.0)
    batch = ALGORITHM.batch(groups)
    await store.commit_step(record_step("run", 1, groups, batch, checkpoint="", metrics={}, context={}))
    assert (await audit(store, "run")).findings != ()
