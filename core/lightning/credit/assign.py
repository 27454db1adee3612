"""Credit from a rollout's place in its group: one comparison for the rollout, or one for each state, place or agent in it.

The invariant: rollouts are compared, never calls: a rollout counts once in every mean and deviation, however often it called.
Time is counted in turns (`lightning.batch.trajectory.turns`), so calls of agents that are not trained discount nothing.
Two calls have the same state exactly when their prompts are the same token ids, whoever made them and whenever. So the
states of a group are a tree: siblings stand in one state until their histories differ, and meet again where an agent's
prompt forgets how it came there.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning.batch.trajectory import Group, Trajectory, inherited, turns
from lightning.credit.intermediate import call_rewards
from lightning.credit.protocol import GroupAdvantage, group_returns
from lightning.errors import ConfigError


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
    """What was earned from each call on, shape (calls,): the step rewards of the calls up to the next turn, `gamma` times those
    from there on, and so on.

    The reward that the agent returned comes with the last call. What a branch earned before its own calls is in none of them.
    """
    returns, own = call_rewards(trajectory), turns(trajectory)
    if len(returns):
        returns[-1] += trajectory.reward
    for call in range(len(returns) - 2, -1, -1):
        returns[call] += (gamma if own[call + 1] else 1.0) * returns[call + 1]
    return returns


def identical(group: Group, advantage: GroupAdvantage) -> list[npt.NDArray[np.float64]]:
    """Every call gets its rollout's advantage: LightningRL's default (Agent Lightning, arXiv 2508.03680)."""
    return [
        np.full(len(trajectory.transitions), value)
        for trajectory, value in zip(group.trajectories, advantage(group_returns(group)), strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Decayed:
    """A call that k turns followed gets gamma^k of its rollout's advantage: early calls are blamed and praised less.

    The rollouts are compared as with `identical`, so where the low level compares them (REINFORCE++ does not) a constant added
    to every reward changes nothing. Scaling by the
    distance to the end is how Kimi-Researcher (Moonshot AI, 2025) discounts outcomes.
    """

    gamma: float = 0.9

    def __post_init__(self) -> None:
        check_discount(self.gamma)

    def __call__(self, group: Group, advantage: GroupAdvantage) -> list[npt.NDArray[np.float64]]:
        """One array of advantages, shape (calls,), for each trajectory."""
        return [
            value * self.gamma ** _turns_after(trajectory)
            for trajectory, value in zip(group.trajectories, advantage(group_returns(group)), strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Discounted:
    """The discounted return from each turn on, compared with the group's at the same place.

    G_k = r_k + gamma G_(k+1), where r_k are the step rewards from turn k up to the next and the outcome comes with the last
    call; the advantage of turn k is the estimator's for G_k among the G_k of the group, as MAGRPO compares turns
    (arXiv 2508.04652). So no turn answers for rewards before it. A rollout that has ended by turn k stands there with its last.
    With gamma = 1 and no step rewards this is `identical`. The turns of a branch stand at the places that they have in the
    whole rollout, and at those before them it is not compared. Calls that are no turns get 0.
    """

    gamma: float = 0.9

    def __post_init__(self) -> None:
        check_discount(self.gamma)

    def __call__(self, group: Group, advantage: GroupAdvantage) -> list[npt.NDArray[np.float64]]:
        """One array of advantages, shape (calls,), for each trajectory."""
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
    """How many turns follow each call, shape (calls,)."""
    own: npt.NDArray[np.float64] = np.cumsum(turns(trajectory)[::-1], dtype=np.float64)[::-1]
    return own - turns(trajectory)


def _spread(values: npt.NDArray[np.float64], own: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    """Numbers of turns as those of calls, shape (calls,)."""
    found = np.zeros(len(own))
    found[own] = values
    return found


def _first_places(group: Group) -> list[int]:
    """How many turns came before the first one of each trajectory: none but for branches."""
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
    """Each agent's calls get their rollout's advantage among the rollouts in which this agent called at all.

    An agent that is only asked in hard cases is then compared with itself, not with rollouts that did without it: the
    statistics by agent of Dr. MAS (arXiv 2602.08847), but with each rollout counted once. An agent that called in one
    rollout only has nobody to be compared with there, and gets the rollout's advantage in the whole group. Agents of one name
    at different places (`math/agent`, `physics/agent`) are different agents.
    """
    returns, whole = group_returns(group), advantage(group_returns(group))
    names = [[call.caller.name for call in trajectory.transitions] for trajectory in group.trajectories]
    found = [np.full(len(own), value) for own, value in zip(names, whole, strict=True)]
    for agent in sorted({name for own in names for name in own}):
        rollouts = [index for index, own in enumerate(names) if agent in own]
        if len(rollouts) > 1:
            for index, value in zip(rollouts, advantage(returns[rollouts]), strict=True):
                found[index][[name == agent for name in names[index]]] = value
    return found


def check_discount(value: float, name: str = "gamma") -> None:
    """Raises `ConfigError` for a number that is no discount."""
    if not 0.0 <= value <= 1.0:
        raise ConfigError(f"{name}={value} is not a discount: use a number from 0 to 1")
