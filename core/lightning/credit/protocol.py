"""What credit assignment is: the high level of LightningRL, between a rollout's return and its single calls.

The invariant: group statistics are taken once over rollouts, in float64, never over calls or rows, so that a rollout with
many calls weighs no more in them than one with few.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from lightning.batch.trajectory import Group, Trajectory

Returns = npt.NDArray[np.float64]
"""One return for each rollout of a group, shape (G,)."""


class GroupAdvantage(Protocol):
    """The low level's estimator: returns of a group's rollouts, shape (G,), to their advantages, shape (G,)."""

    def __call__(self, returns: Returns, /) -> Returns:
        """Advantages in the order of the returns."""


class Credit(Protocol):
    """Spreads each rollout's advantage over its calls.

    Given a group and the low level's estimator, it gives for each trajectory one advantage for each transition. It must
    be a pure function: the audit calls it again. It is asked about groups whose returns are all equal, too: calls may differ.

    An object may say more with attributes. `critic = True`: a critic is trained. `rewards = True`: it adds rewards of its own,
    so that dynamic sampling does not pass over a group for equal returns. A method `prefetch(groups)` is told all groups of a
    step before the first call, so that what takes long (a model that is asked) can be done for all of them at once.
    """

    def __call__(self, group: Group, advantage: GroupAdvantage, /) -> list[npt.NDArray[np.float64]]:
        """One array of advantages, shape (calls,), for each trajectory."""


def rollout_return(trajectory: Trajectory) -> float:
    """What a rollout earned: the reward its agent returned plus the rewards given inside it by `lightning.reward`."""
    return trajectory.reward + sum(reward.value for reward in trajectory.step_rewards)


def group_returns(group: Group) -> Returns:
    """The returns of a group's rollouts, in its order."""
    return np.array([rollout_return(trajectory) for trajectory in group.trajectories], dtype=np.float64)
