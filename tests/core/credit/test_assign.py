"""How a rollout's advantage is spread over its calls."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from lightning.batch.trajectory import Group
from lightning.credit import Discounted, centre, grpo, identical, rollout_return
from lightning.errors import ConfigError
from lightning.plugins import plugins
from lightning.testing.trajectories import make_group, make_trajectory
from lightning.types import StepReward

CALL = ((1, 2), (3,))


def uneven(rewards: tuple[float, ...], calls: tuple[int, ...]) -> Group:
    return Group(
        "g",
        tuple(
            make_trajectory([CALL] * count, rollout=f"g/{index}", index=index, reward=reward)
            for index, (reward, count) in enumerate(zip(rewards, calls, strict=True))
        ),
    )


def test_identical_gives_every_call_its_rollouts_advantage() -> None:
    spread = identical(uneven((1.0, 0.0), (3, 1)), centre)
    assert [part.tolist() for part in spread] == [[0.5, 0.5, 0.5], [-0.5]]


def test_statistics_are_per_rollout_never_per_call() -> None:
    few = identical(uneven((1.0, 0.0, 0.0), (1, 1, 1)), grpo)
    many = identical(uneven((1.0, 0.0, 0.0), (50, 1, 1)), grpo)
    assert [part[0] for part in few] == [part[0] for part in many]


def test_discounted_blames_late_calls_most() -> None:
    spread = Discounted(0.5)(uneven((1.0, 0.0), (3, 1)), centre)
    assert [part.tolist() for part in spread] == [[0.125, 0.25, 0.5], [-0.5]]


def test_discount_one_is_identical() -> None:
    group = uneven((1.0, 0.0), (3, 2))
    for one, other in zip(Discounted(1.0)(group, grpo), identical(group, grpo), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_discount_outside_its_range_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"gamma=1\.5"):
        Discounted(1.5)


def test_rewards_given_inside_a_rollout_count() -> None:
    trajectory = replace(make_trajectory(reward=1.0), step_rewards=(StepReward(0.25), StepReward(-0.5, "format")))
    assert rollout_return(trajectory) == 0.75


def test_a_rollout_without_calls_has_statistics_but_no_advantages() -> None:
    group = Group("g", (make_trajectory([], reward=1.0), *make_group([0.0]).trajectories))
    assert [part.tolist() for part in identical(group, centre)] == [[], [-0.5]]


def test_both_are_registered_under_their_names() -> None:
    assert plugins().credit("identical") is identical
    assert plugins().credit("discounted") == Discounted()
