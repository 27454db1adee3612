"""Credit on the transition tree: what came of a call, beside what came of the same state in other rollouts.

The invariant: at a state, calls are compared by what was earned from there on. What their rollouts had earned before is no
merit of theirs, and where a state is shared it is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning.batch.trajectory import Group
from lightning.credit.advantage import centre, rloo
from lightning.credit.assign import check_discount, returns_to_go, state_ids
from lightning.credit.protocol import GroupAdvantage, group_returns
from lightning.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LeaveOneOut:
    """The return from each call on, minus the mean of what the *other* rollouts earned from the same state on.

    RLOO's baseline (arXiv 2402.14740) at every state that siblings share: the prompt of the first call, later ones for as
    long as their histories are the same token ids, and those where an agent's prompt forgets the difference. A rollout that
    came by several times counts once, with its mean, and never for itself.

    A baseline from few others is a noisy one, so it is mixed with the group's, the rollout's return minus the mean of the
    others: with m other rollouts in the state, the state's share is m / (m + `prior`). With `prior` = 0 one other rollout is
    enough; a call alone in its state always falls back to the group.

    The estimator is not used: the baseline is its own, and advantages are in units of the reward. Baselines and shares
    depend on the other rollouts alone, so they do not bias the policy gradient. Equal prompts are taken for equal states:
    where the environment remembers what the prompt does not say, the baseline is less apt, but still unbiased.
    """

    prior: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.prior < np.inf:
            raise ConfigError(f"prior={self.prior} is not a number of rollouts: use 0 or more")

    def __call__(self, group: Group, advantage: GroupAdvantage) -> list[npt.NDArray[np.float64]]:
        """One array of advantages, shape (calls,), for each trajectory."""
        counts = [len(trajectory.transitions) for trajectory in group.trajectories]
        earned = _joined([returns_to_go(trajectory) for trajectory in group.trajectories])
        rollouts = np.repeat(np.arange(len(counts)), counts)
        found = np.repeat(rloo(group_returns(group)), counts)
        for calls in _shared(state_ids(group)):
            visitors, inverse = np.unique(rollouts[calls], return_inverse=True)
            if (others := len(visitors) - 1) > 0:
                means = np.bincount(inverse, earned[calls]) / np.bincount(inverse)
                here = earned[calls] - means[inverse] + rloo(means)[inverse]
                found[calls] += others / (others + self.prior) * (here - found[calls])
        return _parted(found, counts)


@dataclass(frozen=True, slots=True)
class GiGPO:
    """Group-in-group policy optimisation (arXiv 2505.10978): the rollout's advantage in its group, plus `omega` times the
    call's advantage among the calls made in the same anchor state.

    In anchor groups (equation 6) the discounted returns from each call on (equation 5) are compared by the estimator
    (equation 7), one for each visit, so a rollout that comes by twice counts twice there, as in the paper; a call alone in
    its state adds nothing. The estimator says whether deviations are divided by (F_norm). Anchor states are equal prompts:
    agents whose prompts hold their whole history share only the states before their histories differ.

    The step advantage is relative by definition, so it is centred in its state under every low level. REINFORCE++ leaves the
    rollout's return to the step's normalisation (arXiv 2501.03262), which has one mean for all calls: without a mean of its
    own in each state, a call would be praised for having been made where others were.

    `gamma` and `omega` are the defaults of the authors' code. With gamma < 1 rollouts of different lengths differ in a
    state even if their rewards are equal.
    """

    gamma: float = 0.95
    omega: float = 1.0

    def __post_init__(self) -> None:
        check_discount(self.gamma)
        if not 0.0 <= self.omega < np.inf:
            raise ConfigError(f"omega={self.omega} is not a weight: use a number from 0 up")

    def __call__(self, group: Group, advantage: GroupAdvantage) -> list[npt.NDArray[np.float64]]:
        """One array of advantages, shape (calls,), for each trajectory."""
        counts = [len(trajectory.transitions) for trajectory in group.trajectories]
        earned = _joined([returns_to_go(trajectory, self.gamma) for trajectory in group.trajectories])
        found = np.repeat(advantage(group_returns(group)), counts)
        for calls in _shared(state_ids(group)):
            found[calls] += self.omega * centre(advantage(earned[calls]))
        return _parted(found, counts)


def _shared(states: Sequence[npt.NDArray[np.int64]]) -> Iterator[npt.NDArray[np.intp]]:
    """The calls of each state in which there was more than one, counted over all trajectories."""
    every = np.concatenate([np.zeros(0, np.int64), *states])
    order = np.argsort(every, kind="stable")
    for calls in np.split(order, np.flatnonzero(np.diff(every[order])) + 1):
        if len(calls) > 1:
            yield calls


def _joined(parts: Sequence[npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
    return np.concatenate([np.zeros(0), *parts])


def _parted(values: npt.NDArray[np.float64], counts: Sequence[int]) -> list[npt.NDArray[np.float64]]:
    ends = np.cumsum(counts, dtype=np.intp)
    return [values[end - count : end] for end, count in zip(ends, counts, strict=True)]
