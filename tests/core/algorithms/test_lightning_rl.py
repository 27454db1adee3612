"""LightningRL: which groups and rollouts make rows, with which advantages, in which order."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from lightning.algorithms.lightning_rl import LightningRL
from lightning.batch.trajectory import Group
from lightning.credit import GroupAdvantage
from lightning.errors import ConfigError, DataError, PluginError
from lightning.losses.policy_gradient import ClippedPolicyGradient
from lightning.plugins import plugins
from lightning.testing.trajectories import make_group, make_trajectory
from lightning.types import StepReward

TWO_CALLS = [((1, 2), (3,)), ((1, 2, 3, 4), (5, 6))]


def test_a_mixed_group_makes_one_row_per_rollout_with_its_advantage() -> None:
    batch = LightningRL(group_size=2).batch([make_group([1.0, 0.0], calls=TWO_CALLS)])
    assert [row.ids.tolist() for row in batch.samples] == [[1, 2, 3, 4, 5, 6]] * 2
    expected = 0.5 / (np.sqrt(0.5) + 1e-4)
    for row, sign in zip(batch.samples, (1, -1), strict=True):
        np.testing.assert_allclose(row.advantages[row.weights != 0], sign * expected, rtol=1e-6)
        np.testing.assert_allclose(row.weights[row.weights != 0], 1 / 6)
    assert [rollout.id for rollout in batch.used] == ["group-0/0", "group-0/1"]
    assert batch.skipped == {}


def test_groups_that_teach_nothing_are_skipped_and_counted() -> None:
    silent = make_group([1.0, 0.0], group="silent")
    silent = Group("silent", tuple(replace(member, trainable=(False,)) for member in silent.trajectories))
    batch = LightningRL().batch(
        [
            make_group([1.0, 1.0], group="solved"),
            make_group([0.1 + 0.2, 0.3], group="rounding"),
            make_group([1.0], group="single"),
            make_group([], group="empty"),
            silent,
            make_group([1.0, 0.999], group="close"),
        ]
    )
    assert batch.skipped == {"all_rewards_equal": 2, "too_few_succeeded": 2, "nothing_to_train": 1}
    assert {rollout.group for rollout in batch.used} == {"close"}


def test_nothing_at_all_is_an_empty_batch() -> None:
    batch = LightningRL().batch([])
    assert (batch.samples, batch.used, batch.skipped) == ((), (), {})


def test_a_rollout_with_no_advantage_has_no_row_unless_entropy_is_trained() -> None:
    group = make_group([1.0, 0.5, 0.0])
    assert [rollout.index for rollout in LightningRL().batch([group]).used] == [0, 2]
    assert [rollout.index for rollout in LightningRL(entropy_coefficient=0.01).batch([group]).used] == [0, 1, 2]


def test_step_rewards_are_part_of_the_return() -> None:
    tied = make_group([1.0, 1.0])
    helped = replace(tied.trajectories[0], step_rewards=(StepReward(0.5),))
    batch = LightningRL("dr_grpo").batch([Group("g", (helped, tied.trajectories[1]))])
    assert [float(row.advantages[-1]) for row in batch.samples] == [0.25, -0.25]


def test_order_follows_the_groups_and_is_repeatable() -> None:
    groups = [make_group([1.0, 0.0], group="b"), make_group([0.0, 1.0], group="a")]
    first, again = LightningRL().batch(groups), LightningRL().batch(groups)
    assert [rollout.id for rollout in first.used] == ["b/0", "b/1", "a/0", "a/1"]
    for one, other in zip(first.samples, again.samples, strict=True):
        assert one.spans == other.spans
        for name in ("ids", "weights", "advantages", "logprobs", "versions"):
            assert getattr(one, name).tobytes() == getattr(other, name).tobytes()


@pytest.mark.parametrize(
    ("algorithm", "advantage", "weight"),
    [
        (LightningRL("rloo"), 0.75, 1 / 3),
        (LightningRL("dr_grpo", constant_tokens=10), 0.5, 1 / 30),
        (LightningRL("dr_grpo", normalization="token-mean"), 0.5, 1 / 3),
    ],
)
def test_other_low_levels(algorithm: LightningRL, advantage: float, weight: float) -> None:
    row = algorithm.batch([make_group([1.0, 0.5, 0.0])]).samples[0]
    assert row.advantages[-1] == pytest.approx(advantage)
    assert row.weights[-1] == pytest.approx(weight)


def test_credit_by_name_and_by_function() -> None:
    group = make_group([1.0, 0.0], calls=TWO_CALLS)
    named = LightningRL("dr_grpo", credit="discounted").batch([group]).samples[0]
    assert named.advantages[[2, 4]].tolist() == pytest.approx([0.45, 0.5])

    def last_only(group: Group, advantage: GroupAdvantage) -> list[npt.NDArray[np.float64]]:
        values = advantage(np.array([member.reward for member in group.trajectories]))
        return [np.array([0.0, value]) for value in values]

    own = LightningRL("dr_grpo", credit=last_only).batch([group]).samples[0]
    assert [span.seq for span in own.spans] == [1]


def test_an_unknown_credit_is_named() -> None:
    with pytest.raises(PluginError, match="identicall"):
        LightningRL(credit="identicall").batch([make_group([1.0, 0.0])])


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_refused_by_name(reward: float) -> None:
    with pytest.raises(DataError, match="rollout group-0/1 attempt 1 has the reward"):
        LightningRL().batch([make_group([1.0, reward])])


def test_loss_has_the_algorithms_bounds() -> None:
    assert LightningRL(clip_low=0.1, clip_high=0.3, entropy_coefficient=0.5).loss == ClippedPolicyGradient(
        0.1, 0.3, 0.5
    )


def test_it_is_made_again_from_its_name_and_fields() -> None:
    algorithm = LightningRL("rloo", group_size=4, credit="discounted", normalization="token-mean")
    values = {item.name: getattr(algorithm, item.name) for item in dataclasses.fields(algorithm)}
    assert plugins().algorithm(algorithm.name)(**json.loads(json.dumps(values))) == algorithm


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_each_low_level_is_registered(name: str) -> None:
    assert plugins().algorithm(name)(group_size=4) == LightningRL(name, group_size=4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"low_level": "grop"}, "unknown low_level 'grop'.*did you mean 'grpo'"),
        ({"normalization": "token_mean"}, "did you mean 'token-mean'"),
        ({"group_size": 1}, "group_size=1"),
        ({"clip_low": 1.5}, "cannot be clipped"),
        ({"clip_high": -0.1}, "cannot be clipped"),
        ({"constant_tokens": 0}, "constant_tokens=0"),
    ],
)
def test_impossible_fields_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LightningRL(**fields)  # type: ignore[arg-type]


def test_failed_rollouts_are_absent_not_zero() -> None:
    rewards = [1.0, 0.5]
    with_failure = LightningRL("dr_grpo", group_size=3).batch([make_group(rewards)])
    assert [float(row.advantages[-1]) for row in with_failure.samples] == [0.25, -0.25]


def test_rollouts_without_calls_still_count_in_the_group() -> None:
    group = Group("g", (make_trajectory([], rollout="g/x", reward=0.0), *make_group([1.0, 0.5]).trajectories))
    batch = LightningRL("dr_grpo").batch([group])
    assert [float(row.advantages[-1]) for row in batch.samples] == [0.5]
