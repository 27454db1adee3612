"""Credit functions: how a rollout's advantage is spread over its calls.

The invariant: the group is normalised first, once per rollout, and only then is anything spread over calls.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning.batch.trajectory import Group
from lightning.credit.protocol import GroupAdvantage, group_returns
from lightning.errors import ConfigError


def identical(group: Group, advantage: GroupAdvantage) -> list[npt.NDArray[np.float64]]:
    """Every call gets its rollout's advantage: LightningRL's default (Agent Lightning, arXiv 2508.03680)."""
    return [
        np.full(len(trajectory.transitions), value)
        for trajectory, value in zip(group.trajectories, advantage(group_returns(group)), strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Discounted:
    """A call that k others followed gets gamma^k of its rollout's advantage: early calls are blamed and praised less."""

    gamma: float = 0.9

    def __post_init__(self) -> None:
        if not 0.0 <= self.gamma <= 1.0:
            raise ConfigError(f"gamma={self.gamma} is not a discount: use a number from 0 to 1")

    def __call__(self, group: Group, advantage: GroupAdvantage) -> list[npt.NDArray[np.float64]]:
        """One array of advantages, shape (calls,), for each trajectory."""
        return [
            value * self.gamma ** np.arange(len(trajectory.transitions) - 1, -1, -1, dtype=np.float64)
            for trajectory, value in zip(group.trajectories, advantage(group_returns(group)), strict=True)
        ]
