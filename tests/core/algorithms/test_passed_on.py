"""A batch that another algorithm made is trained with that one's loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from lightning import DPO, SFT
from lightning.algorithms import Batch, Intake, from_batch
from lightning.algorithms.lightning_rl import LightningRL
from lightning.algorithms.presets import PRESETS, LowLevel
from lightning.batch.trajectory import Group
from lightning.losses.policy_gradient import ClippedPolicyGradient
from lightning.losses.protocol import TokenBatch
from lightning.testing.trajectories import make_group
from lightning.trainer.training_data import batch_digest

GROUPS = [make_group([1.0, 0.0, 0.75], group="a"), make_group([0.0, 0.5], group="b")]


def shorter(group: Group) -> Group:
    """A price for each call."""
    members = (
        replace(own, rollout=replace(own.rollout, reward=own.reward - 0.01 * len(own.transitions)))
        for own in group.trajectories
    )
    return Group(group.id, tuple(members))


@from_batch
def shaped(groups: Sequence[Group], *, group_size: int = 8, kl_coefficient: float = 0.1) -> Batch:
    inner = LightningRL("gspo", group_size=group_size, kl_coefficient=kl_coefficient)
    return inner.batch([shorter(group) for group in groups])


def test_shaped_rewards_are_trained_with_the_loss_that_was_asked_for() -> None:
    algorithm = shaped(kl_coefficient=0.25)
    assert algorithm.batch(GROUPS).loss_for(algorithm) == LightningRL("gspo", kl_coefficient=0.25).loss


@pytest.mark.parametrize("inner", [LightningRL("cispo", correction="tis"), SFT(), DPO(beta=0.3)])
def test_any_algorithm_can_be_passed_on(inner: LightningRL | SFT | DPO) -> None:
    @from_batch
    def outer(groups: Sequence[Group]) -> Batch:
        return inner.batch(groups)

    own, passed = inner.batch(GROUPS), outer().batch(GROUPS)
    assert passed.loss_for(outer()) == own.loss_for(inner)
    assert batch_digest(passed) == batch_digest(own)


def test_a_loss_that_was_given_wins() -> None:
    def nothing(tokens: TokenBatch) -> torch.Tensor:
        return 0.0 * tokens.logprobs

    @from_batch(loss=nothing)
    def outer(groups: Sequence[Group]) -> Batch:
        return LightningRL("gspo").batch(groups)

    assert outer().batch(GROUPS).loss_for(outer()) == outer().loss

    @from_batch
    def own(groups: Sequence[Group]) -> Batch:
        return replace(SFT().batch(groups), loss=ClippedPolicyGradient(0.1, 0.1))

    assert own().batch(GROUPS).loss_for(own()) == ClippedPolicyGradient(0.1, 0.1)


def test_rows_that_nobody_else_made_have_the_trainers_loss() -> None:
    @from_batch
    def own(groups: Sequence[Group]) -> Batch:
        members = groups[0].trajectories
        return Intake().batch(members, [[1.0]] * len(members))

    assert own().batch(GROUPS).loss_for(SFT()) == SFT().loss


@pytest.mark.parametrize("low_level", [name for name in PRESETS if name != "ppo"])
def test_the_digest_of_a_step_does_not_depend_on_who_made_it(low_level: LowLevel) -> None:
    batch = LightningRL(low_level).batch(GROUPS)
    assert batch.loss is None
    assert batch_digest(batch) == batch_digest(replace(batch, algorithm=None))


def test_an_object_with_a_loss_of_its_own_is_trained_with_that_one() -> None:
    class Mine:
        name, group_size = "mine", 3
        loss = ClippedPolicyGradient(0.05, 0.07, kl_coefficient=0.5)

        def batch(self, groups: Sequence[Group]) -> Batch:
            return LightningRL("cispo").batch(groups)

    assert Mine().batch(GROUPS).loss_for(Mine()) == Mine.loss
