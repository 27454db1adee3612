"""Rewards inside a rollout: the reward of a tool run by its status, and the call that each reward belongs to.

The invariant: everything here is a pure function of recorded data, so an audit derives the same rewards again. A tool run
belongs to the call (with n > 1, to the choice) whose response asked for it, found by the id of the tool call, or else by the
id of the response that came last before the tool run. If neither id is known, time decides (the agent's clock against the
gateway's), among the calls of the agent that ran the tool if it made any. A reward that a branch repeats of its parent belongs
to none of the branch's calls; it counts in the branch's return alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from lightning.batch.trajectory import Trajectory
from lightning.errors import ConfigError, DataError
from lightning.types import StepReward, ToolEvent, Transition

ToolReward: TypeAlias = Callable[[ToolEvent], float] | Mapping[str, float]
"""Automatic intermediate rewarding (AIR, Agent Lightning, arXiv 2508.03680, section 3.2): a pure function from a tool run to
a reward, or just the reward for each status (`ok`, `error`, `blocked`, `unknown`; 0 for those left out)."""

_NUMBER = (int, float, np.integer, np.floating)
"""The types that a reward may have; numpy's are among them because graders often compute with numpy."""

STATUSES = ("ok", "error", "blocked", "unknown")


@dataclass(frozen=True, slots=True)
class ToolStepReward(StepReward):
    """The reward of a tool run. `seq` is the number of the transition that asked for the tool, since with n > 1 several
    transitions have one `response_id`; -1 if unknown."""

    seq: int = -1


def _is_finite(value: object) -> bool:
    """Whether a value is a finite number of a type that a reward may have."""
    return isinstance(value, _NUMBER) and bool(np.isfinite(value))


def check_tool_reward(rule: ToolReward) -> None:
    """Raise `ConfigError` unless the rule is a function, or a mapping from a tool's statuses to finite numbers."""
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
    """Return the trajectory with a further step reward, `tool:NAME`, for each tool run whose reward by the rule is not 0.

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
    """Return the call that asked for a tool run; None if there is no call, or if a branch repeats the call of its parent.

    Some policy servers restart the ids of tool calls in each conversation, so that several calls may have asked under the same
    id. Then it is the last of them up to the response `event.response_id`, or up to the time of the event if that is unknown.
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
    """Whether a response id belongs to a call that a branch repeats of its parent: the trajectory is a branch, and none of its
    own calls, answered, lost or refused, has this id."""
    if trajectory.rollout.parent is None or not response_id:
        return False
    own = (*trajectory.transitions, *trajectory.lost, *trajectory.refused)
    return all(call.id != response_id for call in own)


def _by_time(trajectory: Trajectory, what: ToolEvent | StepReward, calls: Sequence[Transition]) -> Transition | None:
    """Return the last of the calls that ended by the time of an event or reward; of its choices, the first. If none ended by
    then, return the first call; but None in a branch if there is no response id, for then it happened before the branch's
    calls."""
    ended = [call for call in calls if call.ended_at <= what.at]
    first = calls[0] if calls and (trajectory.rollout.parent is None or what.response_id) else None
    return max(ended, key=lambda call: (call.ended_at, -call.choice, call.seq), default=first)


def call_rewards(trajectory: Trajectory) -> npt.NDArray[np.float64]:
    """Return the sum of the step rewards of each call, shape (calls,).

    A reward belongs to the call with its response id (of several choices to the first; a tool's, to the choice that asked for
    it). A reward without an id, or whose call is not in the trajectory, goes by time to the last call that had ended by then,
    or to the first call if none had. In a branch, a reward that names a call of its parent, or that came before the branch's
    own calls, goes to no call.
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
