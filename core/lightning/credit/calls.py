"""What the calls of a group have in common, and what followed each of them: what credit on single calls is made of.

The invariant: two calls have the same state exactly when their prompts are the same token ids, whoever made them and
whenever. So the states of a group are a tree: siblings stand in one state until their histories differ, and meet again
where an agent's prompt forgets how it came there.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from lightning.batch.trajectory import Group, Trajectory
from lightning.credit.intermediate import call_rewards


def state_ids(group: Group) -> list[npt.NDArray[np.int64]]:
    """The state of each call, shape (calls,) for each trajectory: equal numbers for equal prompts, from 0 in the order in
    which they are first seen. Prompts are compared by 128 bits of their hash."""
    known: dict[bytes, int] = {}
    return [
        np.array(
            [
                known.setdefault(hashlib.blake2b(call.prompt_ids, digest_size=16).digest(), len(known))
                for call in trajectory.transitions
            ],
            dtype=np.int64,
        )
        for trajectory in group.trajectories
    ]


def returns_to_go(trajectory: Trajectory, gamma: float = 1.0) -> npt.NDArray[np.float64]:
    """What was earned from each call on, shape (calls,): its step rewards, `gamma` times those of the next call, and so on.

    The reward that the agent returned comes with the last call.
    """
    returns = call_rewards(trajectory)
    if len(returns):
        returns[-1] += trajectory.reward
    for call in range(len(returns) - 2, -1, -1):
        returns[call] += gamma * returns[call + 1]
    return returns
