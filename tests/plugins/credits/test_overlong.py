"""What overlong answers cost, with every credit function that calls differ by."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from lightning.algorithms.lightning_rl import LightningRL
from lightning.algorithms.presets import PRESETS, LowLevel
from lightning.batch.trajectory import Group
from lightning.credit import Decayed, Discounted, GroupAdvantage, group_returns
from lightning.testing.trajectories import make_trajectory
from lightning_credits import GiGPO, Intermediate, LeaveOneOut


def group(*lengths: list[int], rewards: tuple[float, ...]) -> Group:
    members = [
        make_trajectory([((1,), tuple(range(2, 2 + length))) for length in own], rollout=f"g/{index}", reward=reward)
        for index, (own, reward) in enumerate(zip(lengths, rewards, strict=True))
    ]
    return Group("g", tuple(members))


def judged(group: Group, advantage: GroupAdvantage) -> list[npt.NDArray[np.float64]]:
    """A credit function with rewards of its own, which says the same of all."""
    return [np.full(1, value) for value in advantage(group_returns(group) + 3.0)]


judged.rewards = True  # type: ignore[attr-defined]


@pytest.mark.parametrize("credit", [None, Intermediate(), Decayed(), Discounted(), LeaveOneOut(), GiGPO(), judged])
@pytest.mark.parametrize("low_level", [name for name in PRESETS if name != "ppo"])
@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_equal_rewards_are_equal_whatever_a_length_costs(reward: float, low_level: LowLevel, credit: object) -> None:
    """Eight rewards of 0, one of them lowered by 0.05, would be -2.46 and +0.35."""
    own = group([20], *[[2]] * 7, rewards=(reward,) * 8)
    algorithm = LightningRL(low_level, credit=credit, overlong_tokens=10, overlong_penalty=0.05)  # type: ignore[arg-type]
    batch = algorithm.batch([own])
    assert (batch.samples, batch.skipped) == ((), {"all_rewards_equal": 1})
    assert credit is judged or low_level == "reinforce++" or not algorithm.teaches(own)
