"""The interface of credit assignment, the high level of LightningRL: from a rollout's return to the advantages of its calls.

The invariant: group statistics are taken over rollouts, in float64, never over calls or rows, so that a rollout with many
calls weighs no more in them than one with few.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from lightning.batch.build import Advantages
from lightning.batch.trajectory import Group, Trajectory

Returns = npt.NDArray[np.float64]
"""One return for each rollout of a group, shape (G,)."""


class GroupAdvantage(Protocol):
    """The low level's estimator: a function from the returns of a group's rollouts, shape (G,), to their advantages."""

    def __call__(self, returns: Returns, /) -> Returns:
        """Return the advantages, shape (G,), in the order of the returns."""


class Credit(Protocol):
    """A function that spreads each rollout's advantage over its calls.

    Given a group and the low level's estimator, it returns for each trajectory one advantage for each transition: a number, or
    an array with one for each token of the response. It must be pure, since an audit calls it again. It also gets groups whose
    returns are all equal, because their calls may still differ.

    Optional attributes: `head = "name"` makes the engine train the head that is registered under this name, whose values are
    in `Trajectory.values`; a method `value_targets(trajectory)` returns the values for it to learn, shape (calls,). `rewards =
    True` says that the credit adds rewards of its own, so that dynamic sampling keeps groups whose returns are equal.
    `knows_branches = True` says that the credit compares branches with the rollouts that they part from; a run whose groups
    have branches warns of any other credit. A method `prefetch(groups)` gets all groups of a step before the first call, so
    that slow work (asking a model) can be done for all of them at once.
    """

    def __call__(self, group: Group, advantage: GroupAdvantage, /) -> Advantages:
        """Return, for each trajectory, an advantage for each transition: an array of shape (calls,), or a list in which some
        are arrays with a number for each response token."""


def rollout_return(trajectory: Trajectory) -> float:
    """Return a rollout's return: the reward that its agent returned plus all its step rewards (`lightning.reward`, tools)."""
    return trajectory.reward + sum(reward.value for reward in trajectory.step_rewards)


def group_returns(group: Group) -> Returns:
    """Return the returns of a group's rollouts in the group's order, shape (G,)."""
    return np.array([rollout_return(trajectory) for trajectory in group.trajectories], dtype=np.float64)
