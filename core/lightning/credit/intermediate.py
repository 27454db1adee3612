"""Rewards inside a rollout: what a tool's status is worth, and which call each reward belongs to.

The invariant: everything here is a pure function of what was recorded, so an audit derives the same rewards again. A tool
run belongs to the call (and, with n > 1, to the choice) whose response asked for it, by the id of the tool call, else to the
call that came last before it, by the id of the response. Only where nobody knows an id does time decide, the agent's clock
against the gateway's: among the calls of the agent that ran the tool, if it made any. What a branch earned before its own calls
belongs to none of them: it is in its return alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from lightning.batch.trajectory import Group, Trajectory, turns
from lightning.credit.protocol import GroupAdvantage
from lightning.errors import ConfigError, DataError
from lightning.types import StepReward, ToolEvent, Transition

ToolReward: TypeAlias = Callable[[ToolEvent], float] | Mapping[str, float]
"""Automatic intermediate rewarding (AIR, Agent Lightning, arXiv 2508.03680, section 3.2): a pure function from a tool run to
a reward, or just the reward for each status (`ok`, `error`, `blocked`, `unknown`; 0 for those left out)."""

_NUMBER = (int, float, np.integer, np.floating)
"""What a reward may be: graders often compute with numpy."""

STATUSES = ("ok", "error", "blocked", "unknown")


@dataclass(frozen=True, slots=True)
class ToolStepReward(StepReward):
    """What a tool run earned. `seq` is the transition that it belongs to, which `response_id` leaves open with n > 1."""

    seq: int = -1


def _is_finite(value: object) -> bool:
    """Whether something is a number that a reward can be."""
    return isinstance(value, _NUMBER) and bool(np.isfinite(value))


def check_tool_reward(rule: ToolReward) -> None:
    """Raises `ConfigError` for a mapping from anything but a tool's statuses to finite numbers."""
    if not isinstance(rule, Mapping):
        if not callable(rule):
            raise ConfigError(f"tool_reward={rule!r}: give a function of a ToolEvent, or a reward for each status")
        return
    for status, value in rule.items():
        if status not in STATUSES:
            raise ConfigError(f"tool_reward has no status {status!r}: a tool run is one of {', '.join(STATUSES)}")
        if not isinstance(value, int | float) or not np.isfinite(value):
            raise ConfigError(f"tool_reward[{status!r}]={value!r} is not a finite number")


def with_tool_rewards(trajectory: Trajectory, rule: ToolReward) -> Trajectory:
    """The trajectory with one more step reward, `tool:NAME`, for each tool run that the rule gives something other than 0.

    Raises `DataError` when the rule gives no finite number.
    """
    given = []
    for event in trajectory.tool_events:
        value = rule.get(event.status, 0.0) if isinstance(rule, Mapping) else rule(event)
        if not _is_finite(value):
            raise DataError(
                f"tool_reward gave {value!r} for the tool {event.name!r} ({event.status}) of rollout "
                f"{trajectory.rollout.id}: it has to return a finite number"
            )
        if value:
            call = _call_behind(event, trajectory)
            response_id, seq = (call.id, call.seq) if call else (event.response_id, -1)
            given.append(ToolStepReward(float(value), f"tool:{event.name}", response_id, event.at, seq))
    return replace(trajectory, step_rewards=(*trajectory.step_rewards, *given)) if given else trajectory


def _call_behind(event: ToolEvent, trajectory: Trajectory) -> Transition | None:
    """The call that a tool ran for; None when there is no call, or it is one of a branch's parent.

    Some policy servers count their ids anew in each conversation, so that agents side by side use the same ones: then the
    last call that asked is meant, up to the one before the event or, where that is not known, to the time of the event.
    """
    known = trajectory.transitions
    before = next((call for call in known if event.response_id and call.id == event.response_id), None)
    if before is None and _is_inherited(trajectory, event.response_id):
        return None
    if event.call_id and (asked := [call for call in known if event.call_id in call.tool_calls]):
        if before is None:
            return _by_time(trajectory, event, asked)
        same = [call for call in asked if call.id == before.id]
        earlier = (call for call in asked if call.seq < before.seq)
        return same[0] if same else max(earlier, key=attrgetter("seq"), default=asked[0])
    if before is not None:
        return before
    agent = event.caller.name if event.caller else ""
    return _by_time(trajectory, event, [call for call in known if call.caller.name == agent] or known)


def _is_inherited(trajectory: Trajectory, response_id: str) -> bool:
    """Whether an id is that of a call which a branch has from its parent: of its own calls, kept or not, it is none."""
    if trajectory.rollout.parent is None or not response_id:
        return False
    own = (*trajectory.transitions, *trajectory.lost, *trajectory.refused)
    return all(call.id != response_id for call in own)


def _by_time(trajectory: Trajectory, what: ToolEvent | StepReward, calls: Sequence[Transition]) -> Transition | None:
    """The last call that had ended by then, of its choices the first. When none had, it is the first call, but nobody where the
    rollout is a branch and no call of its own is named: it was before them."""
    ended = [call for call in calls if call.ended_at <= what.at]
    first = calls[0] if calls and (trajectory.rollout.parent is None or what.response_id) else None
    return max(ended, key=lambda call: (call.ended_at, -call.choice, call.seq), default=first)


def call_rewards(trajectory: Trajectory) -> npt.NDArray[np.float64]:
    """The step rewards of each call, shape (calls,).

    A reward belongs to the call with its response id (the first choice, where there are several; a tool's, to the choice
    that asked for it). Time serves one without an id, or whose call was not kept: the last call that had ended by then gets
    it, and the first call when none had. In a branch, nobody gets what names a call of its parent, or was earned before its own
    calls.
    """
    calls = list(trajectory.transitions)
    rewards = np.zeros(len(calls))
    by_id: dict[str, int] = {}
    by_seq = {call.seq: index for index, call in enumerate(calls)}
    for index, call in enumerate(calls):
        by_id.setdefault(call.id, index)
    for reward in trajectory.step_rewards:
        found = by_seq.get(reward.seq) if isinstance(reward, ToolStepReward) else None
        if found is None and reward.response_id:
            found = by_id.get(reward.response_id)
        if found is None and not _is_inherited(trajectory, reward.response_id):
            last = _by_time(trajectory, reward, calls)
            found = None if last is None else by_seq[last.seq]
        if found is not None:
            rewards[found] += reward.value
    return rewards


@dataclass(frozen=True, slots=True)
class Intermediate:
    """The outcome's advantage for every call, and to each call alone what it earned itself, above the group's mean per turn.

    So a call is praised or blamed for its own tools, and the rest of its rollout only for the outcome: (advantage of the
    returned rewards) + `weight` · (the call's step rewards - their mean over all turns of the group).
    """

    weight: float = 1.0

    def __call__(self, group: Group, advantage: GroupAdvantage) -> list[npt.NDArray[np.float64]]:
        """One array of advantages, shape (calls,), for each trajectory."""
        outcomes = advantage(np.array([member.reward for member in group.trajectories], dtype=np.float64))
        own = [call_rewards(member) for member in group.trajectories]
        counted = [rewards[turns(member)] for member, rewards in zip(group.trajectories, own, strict=True)]
        every = np.concatenate(counted) if counted else np.zeros(0)
        mean = every.mean() if len(every) else 0.0
        return [
            np.full(len(rewards), outcome) + self.weight * (rewards - mean)
            for outcome, rewards in zip(outcomes, own, strict=True)
        ]
