"""The critic's credit: how much better each call turned out than the critic's value of its state predicted.

The invariant: time is counted in trained calls, never in tokens. Other agents, tools and untrained calls between two trained
calls belong to the environment; rewards that are given there count for the trained call before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from lightning.batch import Group, Trajectory, is_trained
from lightning.config import refuses_unknown
from lightning.credit import GroupAdvantage, call_rewards, check_discount
from lightning.errors import DataError


@refuses_unknown
@dataclass(frozen=True, slots=True)
class Critic:
    """Generalized advantage estimation (arXiv 1506.02438, equation 16) over the trained calls of each rollout.

    With the trained calls k = 0..K-1, V_k the critic's value of the state of call k (`Trajectory.values`) and V_K = 0:
    delta_k = r_k + `gamma` V_(k+1) - V_k and A_k = delta_k + `gamma` `lam` A_(k+1). r_k are the step rewards from call k up
    to the next trained call; the reward that the agent returned counts at the last trained call. Rewards before the first
    trained call count for no call. `lam` = 1 is return minus value (no bias from a wrong critic); `lam` = 0 relies on the
    critic's value of the next state (least variance).

    Neither the rest of the group nor the estimator is used: the critic is the baseline. An algorithm that uses this credit must
    have `head = "critic"`, as the credit has, and train the critic with `value_targets`.
    """

    gamma: float = 1.0
    lam: float = 0.95

    head: ClassVar[str] = "critic"
    """The head whose values this credit needs in `Trajectory.values`."""

    def __post_init__(self) -> None:
        check_discount(self.gamma)
        check_discount(self.lam, "lam")

    def __call__(self, group: Group, advantage: GroupAdvantage) -> list[npt.NDArray[np.float64]]:
        """Return an array of advantages, shape (calls,), for each trajectory: 0 for calls that are not trained.

        Raises `DataError` for a trained call whose state has no value, and for an untrained call whose state has one.
        """
        return [self.advantages(trajectory) for trajectory in group.trajectories]

    def advantages(self, trajectory: Trajectory) -> npt.NDArray[np.float64]:
        """Return the advantages of one rollout's calls, shape (calls,): 0 for calls that are not trained. Raises `DataError`
        for a trained call whose state has no value."""
        found = np.zeros(len(trajectory.transitions))
        calls = _trained(trajectory)
        if not len(calls):
            return found
        values = _values(trajectory, calls)
        rewards = np.add.reduceat(call_rewards(trajectory), calls)
        rewards[-1] += trajectory.reward
        deltas = rewards + self.gamma * np.append(values[1:], 0.0) - values
        running = 0.0
        for place in range(len(calls) - 1, -1, -1):
            running = deltas[place] + self.gamma * self.lam * running
            found[calls[place]] = running
        return found

    def value_targets(self, trajectory: Trajectory) -> npt.NDArray[np.float64]:
        """Return the value that the critic should learn for each trained call's state: advantage plus value, the lambda-return.
        Shape (calls,), NaN for calls that are not trained."""
        targets = np.full(len(trajectory.transitions), np.nan)
        if len(calls := _trained(trajectory)):
            targets[calls] = self.advantages(trajectory)[calls] + _values(trajectory, calls)
        return targets


def _trained(trajectory: Trajectory) -> npt.NDArray[np.intp]:
    flags = zip(trajectory.transitions, trajectory.trainable, strict=True)
    return np.flatnonzero([is_trained(call, trainable) for call, trainable in flags])


def _values(trajectory: Trajectory, calls: npt.NDArray[np.intp]) -> npt.NDArray[np.float64]:
    """Return the critic's values at `calls`, the indices of the trained calls. Raises `DataError` if one is missing or not
    finite."""
    rollout, count = trajectory.rollout.id, len(trajectory.transitions)
    if not trajectory.values:
        raise DataError(
            f"rollout {rollout} has no values of its states, which the critic's credit needs: the algorithm must have "
            '`head = "critic"`, so that the engine is opened with a critic and values the states before credit is assigned'
        )
    for call, value in zip(trajectory.transitions, trajectory.values, strict=False):
        if call.untrained and np.isfinite(value):
            raise DataError(
                f"rollout {rollout} attempt {trajectory.rollout.attempt} call {call.seq} is recorded and not trained "
                f"({call.untrained}), but its state has the critic's value {value}, as if it were: the call was marked after "
                "its state was valued, so these values belong to other calls. Value the states again"
            )
    if len(trajectory.values) != count:
        raise DataError(f"rollout {rollout} has {count} calls, but values of {len(trajectory.values)} states")
    values = np.asarray(trajectory.values, dtype=np.float64)[calls]
    if len(missing := np.flatnonzero(~np.isfinite(values))):
        place = calls[missing[0]]
        raise DataError(
            f"rollout {rollout} attempt {trajectory.rollout.attempt} call {trajectory.transitions[place].seq} is trained, "
            f"but the critic's value of its state is {trajectory.values[place]}"
        )
    return values
