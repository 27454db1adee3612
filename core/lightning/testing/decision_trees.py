"""Groups with branches: rollouts of a decision task, and others that begin as they did up to some call.

The invariant: a branch is what a real one would be. It has its own calls alone, from a state that its parent was in; the
prefix that it shares is in its reward, and in step rewards that name its parent's calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from lightning.batch.trajectory import Trajectory
from lightning.config import BranchBy
from lightning.errors import ConfigError
from lightning.testing.decisions import (
    DecisionPath,
    DecisionTask,
    Floats,
    SampledGroup,
    as_sampled,
    path_trajectory,
    walk,
)
from lightning.types import Transition


class ChoosesPoints(Protocol):
    """Chooses at which calls of trunks to branch, as `lightning_branching.branch_points.branch_points` does."""

    def __call__(
        self,
        trunks: Sequence[Trajectory],
        tokens: float,
        by: BranchBy = ...,
        seed: int = ...,
        branches: Sequence[Trajectory] = ...,
        per_call: float | None = ...,
    ) -> Sequence[tuple[Trajectory, Transition]]:
        """The calls, each with its trunk, for so many tokens."""


@dataclass(frozen=True, slots=True)
class TreeSampling:
    """How a group is sampled instead of as independent rollouts: `trunks` of them, and for the tokens of the others branches,
    at the calls that `points` chooses `by`.

    A call is a token here. Branches may sample so many calls for each of the trunks' as the group has other rollouts for each
    trunk; by `variance`, half of them before it looks at returns, as with `trainer.sampling = tree`. With `per_call`, each
    call has so many branches on average, whatever that costs.
    """

    points: ChoosesPoints
    trunks: int = 4
    by: BranchBy = "random"
    per_call: float | None = None

    def __post_init__(self) -> None:
        if self.trunks < 1:
            raise ConfigError(f"trunks={self.trunks}: there is nothing to branch")


def sample_tree(
    task: DecisionTask,
    size: int,
    tree: TreeSampling,
    rng: np.random.Generator,
    *,
    name: str = "group",
    values: Floats | None = None,
) -> SampledGroup:
    """A group that samples about as many calls as `size` independent rollouts. `values` as of `sample_group`."""
    paths = [walk(task, DecisionPath(), rng) for _ in range(tree.trunks)]
    trunks = [path_trajectory(task, path, name, index, values) for index, path in enumerate(paths)]
    made, own = list(trunks), list(paths)
    share = 1e6 if tree.per_call is not None else max(0, size - tree.trunks) / tree.trunks
    tokens = share * sum(len(path.states) for path in paths)
    for part in (tokens / 2, tokens / 2) if tree.by == "variance" else (tokens,):
        seed = int(rng.integers(2**31))
        known = made[len(trunks) :]
        for trunk, call in tree.points(trunks, part, tree.by, seed, known, tree.per_call):
            at = paths[trunk.rollout.index]
            whole = walk(task, at.part(slice(call.seq)), rng, at.states[call.seq])
            made.append(branch_of(path_trajectory(task, whole, name, len(made), values), trunk, call.seq))
            own.append(whole.part(slice(call.seq, None)))
    return as_sampled(name, made, own)


def branch_of(whole: Trajectory, trunk: Trajectory, seq: int) -> Trajectory:
    """What is recorded of a rollout that begins as its trunk did up to the call `seq`."""
    name = whole.rollout.id
    calls = [replace(call, seq=place, id=f"{name}/{place}") for place, call in enumerate(whole.transitions[seq:])]
    known = [call.id for call in (*trunk.transitions[:seq], *calls)]
    ids = dict(zip((call.id for call in whole.transitions), known, strict=True))
    steps = tuple(replace(reward, response_id=ids[reward.response_id]) for reward in whole.step_rewards)
    return replace(
        whole,
        rollout=replace(whole.rollout, parent=trunk.transitions[seq].key),
        transitions=tuple(calls),
        trainable=whole.trainable[seq:],
        step_rewards=steps,
        values=whole.values[seq:],
    )


def independent(group: Sequence[Trajectory]) -> int:
    """How many of the trajectories are no branches."""
    return sum(member.rollout.parent is None for member in group)
