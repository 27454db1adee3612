"""A credit for several agents: a call is compared with the calls of the same agent at the same turn of the group's rollouts.

The invariant: a rollout is in each comparison at most once, so that a talkative rollout weighs no more than the others.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from lightning.batch import Group, Trajectory, turns
from lightning.config import refuses_unknown
from lightning.credit import GroupAdvantage, check_discount, group_returns, returns_to_go


@refuses_unknown
@dataclass(frozen=True, slots=True)
class AgentTurn:
    """A credit with the groups of AT-GRPO (arXiv 2510.11062): the calls that one agent made at its own turn t, over the
    rollouts of a task. The low level's estimator compares the discounted returns from each of these calls on.

    So a planner's first call is compared with other first calls of planners, and not with a coder's third. Turns are counted
    for each agent by its path, over the calls that are trained. A call that no other rollout has a counterpart for gets the
    advantage of its rollout in the group.

    The paper samples the candidates of a turn from one state (tree sampling); here the rollouts of a group are independent, so
    that from the second turn on the compared calls answer different prompts. With `trainer.trunks` rollouts branch at a call,
    and share the turns before it.
    """

    gamma: float = 1.0

    def __post_init__(self) -> None:
        check_discount(self.gamma)

    def __call__(self, group: Group, advantage: GroupAdvantage) -> list[npt.NDArray[np.float64]]:
        """Return one array of advantages, shape (calls,), for each trajectory of the group."""
        members = group.trajectories
        earned = [returns_to_go(member, self.gamma) for member in members]
        outcomes = advantage(group_returns(group))
        found = [np.full(len(own), outcome) for own, outcome in zip(earned, outcomes, strict=True)]
        cells: dict[tuple[str, int], list[tuple[int, int]]] = {}
        for place, member in enumerate(members):
            for call, cell in _cells(member).items():
                cells.setdefault(cell, []).append((place, call))
        for calls in cells.values():
            if len(calls) > 1:
                values = advantage(np.array([earned[place][call] for place, call in calls], dtype=np.float64))
                for (place, call), value in zip(calls, values, strict=True):
                    found[place][call] = value
        return found


def _cells(member: Trajectory) -> dict[int, tuple[str, int]]:
    """Return, for each turn of a rollout by its place among the calls, the agent and which of the agent's turns it is."""
    seen, found = Counter[str](), {}
    for place, (call, is_turn) in enumerate(zip(member.transitions, turns(member), strict=True)):
        if is_turn:
            found[place] = call.caller.name, seen[call.caller.name]
            seen[call.caller.name] += 1
    return found
