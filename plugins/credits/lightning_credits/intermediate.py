"""A credit that adds the step rewards of each single call to the advantage that all calls of a rollout share.

The invariant: the part of a call's own rewards has the mean 0 over the turns of the group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from lightning.batch import Group, turns
from lightning.config import refuses_unknown
from lightning.credit import GroupAdvantage, call_rewards


@refuses_unknown
@dataclass(frozen=True, slots=True)
class Intermediate:
    """A credit that adds to the outcome's advantage, which all calls of a rollout share, the step rewards of each single call.

    A call's advantage is (advantage of the returned rewards) + `weight` · (the call's step rewards - their mean over all turns
    of the group). So a tool run counts for the call that asked for it, and not for the rest of its rollout.
    """

    weight: float = 1.0

    def __call__(self, group: Group, advantage: GroupAdvantage) -> list[npt.NDArray[np.float64]]:
        """Return one array of advantages, shape (calls,), for each trajectory of the group."""
        outcomes = advantage(np.array([member.reward for member in group.trajectories], dtype=np.float64))
        own = [call_rewards(member) for member in group.trajectories]
        counted = [rewards[turns(member)] for member, rewards in zip(group.trajectories, own, strict=True)]
        every = np.concatenate(counted) if counted else np.zeros(0)
        mean = every.mean() if len(every) else 0.0
        return [
            np.full(len(rewards), outcome) + self.weight * (rewards - mean)
            for outcome, rewards in zip(outcomes, own, strict=True)
        ]
