"""Credit by comparing the rollouts of a group: once for a whole rollout, or once for each turn or agent in it.

The invariant: rollouts are compared, never calls: a rollout counts once in every mean and deviation, however many calls it
made. Time is counted in turns (`lightning.batch.trajectory.turns`), so calls of agents that are not trained discount nothing.
Two calls have the same state exactly when their prompts are the same token ids, whichever agent made them and whenever. So the
states of a group form a tree: rollouts share states until their histories differ, and meet again where an agent's prompt no
longer holds the difference.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning.batch.trajectory import Group, Trajectory, inherited, turns
from lightning.config.arguments import refuses_unknown
from lightning.credit.intermediate import call_rewards
from lightning.credit.protocol import GroupAdvantage, group_returns
from lightning.errors import ConfigError


def state_ids(group: Group) -> list[npt.NDArray[np.int64]]:
    """Return a number for the state of each call, shape (calls,) for each trajectory: equal prompts have equal numbers, counted
    from 0 in the order of their first calls. Prompts are compared by 128 bits of their hash."""
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
    """Return the discounted sum of rewards from each call on, shape (calls,): each turn after the call multiplies the rewards
    from that turn on by `gamma`.

    The reward that the agent returned is counted at the last call. Rewards that a branch repeats of its parent are left out.
    """
    returns, own = call_rewards(trajectory), turns(trajectory)
    if len(returns):
        returns[-1] += trajectory.reward
    for call in range(len(returns) - 2, -1, -1):
        returns[call] += (gamma if own[call + 1] else 1.0) * returns[call + 1]
    return returns


def identical(group: Group, advantage: GroupAdvantage) -> list[npt.NDArray[np.float64]]:
    """Give every call its rollout's advantage: LightningRL's default (Agent Lightning, arXiv 2508.03680)."""
    return [
        np.full(len(trajectory.transitions), value)
        for trajectory, value in zip(group.trajectories, advantage(group_returns(group)), strict=True)
    ]


@refuses_unknown
@dataclass(frozen=True, slots=True)
class Decayed:
    """A credit that gives a call gamma^k of its rollout's advantage, where k turns follow the call: early calls get less.

    The rollouts are compared as with `identical`. So a constant added to every reward changes nothing if the low level compares
    rollouts (REINFORCE++ does not). Kimi-Researcher (Moonshot AI, 2025) discounts outcomes by the distance to the end, too.
    """

    gamma: float = 0.9

    def __post_init__(self) -> None:
        check_discount(self.gamma)

    def __call__(self, group: Group, advantage: GroupAdvantage) -> list[npt.NDArray[np.float64]]:
        """Return one array of advantages, shape (calls,), for each trajectory of the group."""
        return [
            value * self.gamma ** _turns_after(trajectory)
            for trajectory, value in zip(group.trajectories, advantage(group_returns(group)), strict=True)
        ]


@refuses_unknown
@dataclass(frozen=True, slots=True)
class Discounted:
    """A credit that compares the discounted return from turn k on with the returns from turn k on of the other rollouts.

    G_k = r_k + gamma G_(k+1), where r_k are the step rewards from turn k up to the next turn; the agent's returned reward
    counts at the last call. The advantage of turn k is the estimator's for G_k among the G_k of the group, as MAGRPO compares
    turns (arXiv 2508.04652). So rewards before a turn do not count for it. A rollout with fewer turns is compared by the G of
    its last turn. With gamma = 1 and no step rewards this is `identical`. A branch's first turn is numbered after the turns
    that it repeats of its parent, and the branch is left out of the comparisons before it. Calls that are no turns get 0.
    """

    gamma: float = 0.9

    def __post_init__(self) -> None:
        check_discount(self.gamma)

    def __call__(self, group: Group, advantage: GroupAdvantage) -> list[npt.NDArray[np.float64]]:
        """Return one array of advantages, shape (calls,), for each trajectory of the group."""
        own_turns = [turns(trajectory) for trajectory in group.trajectories]
        returns = [
            returns_to_go(trajectory, self.gamma)[own]
            for trajectory, own in zip(group.trajectories, own_turns, strict=True)
        ]
        starts = _first_places(group)
        found = [np.zeros(len(own)) for own in returns]
        for place in range(max((start + len(own) for start, own in zip(starts, returns, strict=True)), default=0)):
            there = [index for index, start in enumerate(starts) if start <= place]
            here = []
            for index in there:
                own = returns[index]
                last = min(place - starts[index], len(own) - 1)
                here.append(own[last] if len(own) else group.trajectories[index].reward)
            for index, value in zip(there, advantage(np.array(here)), strict=True):
                if place - starts[index] < len(found[index]):
                    found[index][place - starts[index]] = value
        return [_spread(values, own) for values, own in zip(found, own_turns, strict=True)]


def _turns_after(trajectory: Trajectory) -> npt.NDArray[np.float64]:
    """Return the number of turns after each call, shape (calls,)."""
    own: npt.NDArray[np.float64] = np.cumsum(turns(trajectory)[::-1], dtype=np.float64)[::-1]
    return own - turns(trajectory)


def _spread(values: npt.NDArray[np.float64], own: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    """Return an array of shape (calls,) with `values`, one for each turn, at the turns (`own` is true) and 0 at other calls."""
    found = np.zeros(len(own))
    found[own] = values
    return found


def _first_places(group: Group) -> list[int]:
    """Return, for each trajectory, the number of turns before its first one: 0 unless it is a branch, which repeats its
    parent's."""
    before = inherited(group.trajectories)
    own = {
        call.key
        for member in group.trajectories
        for call, is_turn in zip(member.transitions, turns(member), strict=True)
        if is_turn
    }
    return [
        sum(call.key in own for call, _ in before[member.rollout.id])
        if member.rollout.id in before
        else member.rollout.parent[2]
        if member.rollout.parent
        else 0
        for member in group.trajectories
    ]


def per_agent(group: Group, advantage: GroupAdvantage) -> list[npt.NDArray[np.float64]]:
    """Give each agent's calls their rollout's advantage among the rollouts in which this agent made a call.

    So an agent that only works in hard cases is compared with itself, not with rollouts without it. These are the statistics
    by agent of Dr. MAS (arXiv 2602.08847), but each rollout counts once. The calls of an agent that appears in one rollout only
    get the rollout's advantage in the whole group. Agents of one name at different places (`math/agent`, `physics/agent`) are
    different agents. Untrained calls are of no agent.
    """
    returns, whole = group_returns(group), advantage(group_returns(group))
    names = [
        ["" if call.untrained else call.caller.name for call in trajectory.transitions]
        for trajectory in group.trajectories
    ]
    found = [np.full(len(own), value) for own, value in zip(names, whole, strict=True)]
    for agent in sorted({name for own in names for name in own if name}):
        rollouts = [index for index, own in enumerate(names) if agent in own]
        if len(rollouts) > 1:
            for index, value in zip(rollouts, advantage(returns[rollouts]), strict=True):
                found[index][[name == agent for name in names[index]]] = value
    return found


def check_discount(value: float, name: str = "gamma") -> None:
    """Raise `ConfigError`, with the setting's `name`, unless `value` is a discount: a number from 0 to 1."""
    if not 0.0 <= value <= 1.0:
        raise ConfigError(f"{name}={value} is not a discount: use a number from 0 to 1")
