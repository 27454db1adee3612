"""Finished rollouts as the learning algorithms get them, and the flaws that make a call impossible to train on.

The invariant: a flaw depends on one call alone, not on the model, the reward or other calls. So a rollout with a flawed call
can be left out before anything is computed from its group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning.types import CallStatus, Rollout, StepReward, ToolEvent, Transition


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One succeeded rollout with everything recorded about it.

    `transitions` are its answered calls in `seq` order; `trainable[i]` says whether call i belongs to the component of
    interest. `values[i]` is the head's value of call i's state before the step (NaN for calls that are not trained); `values`
    is empty without a head. `refused` are the calls whose request the gateway or vLLM refused, `lost` the calls whose answer
    the agent did not get whole. `parent_calls` are, in a branch, all calls of the attempt that it branches from; it is empty if
    the store lacks them. A masked rollout has no trainable call; `of_interest` then says which calls belong to the component of
    interest.
    """

    rollout: Rollout
    transitions: tuple[Transition, ...]
    trainable: tuple[bool, ...]
    tool_events: tuple[ToolEvent, ...] = ()
    step_rewards: tuple[StepReward, ...] = ()
    values: tuple[float, ...] = ()
    refused: tuple[Transition, ...] = ()
    lost: tuple[Transition, ...] = ()
    parent_calls: Sequence[Transition] = ()
    of_interest: tuple[bool, ...] = ()

    @property
    def reward(self) -> float:
        """The reward that the agent returned for the whole rollout."""
        assert self.rollout.reward is not None, "only succeeded rollouts become trajectories"
        return self.rollout.reward


@dataclass(frozen=True, slots=True)
class Group:
    """The trajectories of one task (GRPO's group), in `rollout.index` order; failed rollouts are absent."""

    id: str
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True)
class BranchedAt:
    """The place where a branch leaves its parent: the call `call` of the trajectory `parent`."""

    parent: Trajectory
    call: Transition

    @property
    def prefix(self) -> tuple[Transition, ...]:
        """The parent's calls whose recorded answers the branch repeats before its own calls."""
        return tuple(call for call in self.parent.transitions if is_prefix(call, self.call))


def inherited(members: Iterable[Trajectory]) -> dict[str, tuple[tuple[Transition, bool], ...]]:
    """Return, by a branch's rollout id, the calls that the branch repeats of its parent and of the parent's own parents, each
    with whether it is trainable. Branches whose parent is not among the members are absent."""
    known = branched_at(members)
    found: dict[str, tuple[tuple[Transition, bool], ...]] = {}
    for branch in known:
        calls: tuple[tuple[Transition, bool], ...] = ()
        at: BranchedAt | None = known[branch]
        for _ in known:
            if at is None:
                break
            flags = zip(at.parent.transitions, at.parent.trainable, strict=True)
            calls = (*(pair for pair in flags if is_prefix(pair[0], at.call)), *calls)
            at = known.get(at.parent.rollout.id)
        found[branch] = calls
    return found


def is_prefix(call: Transition, at: Transition) -> bool:
    """Whether a branch at the call `at` gets the recorded answer of `call`, an earlier call of the same rollout: `call` was
    answered before `at` was sent. Calls that were still under way then are sampled anew."""
    return call.seq < at.seq and call.ended_at <= at.started_at


def begins_at(calls: Sequence[Transition], at: Transition) -> bool:
    """Whether one of a branch's own `calls` was answered and has the prompt of `at`, the call at which it branches, token for
    token."""
    return any(call.status.answered and call.prompt_ids == at.prompt_ids for call in calls)


def branched_at(trajectories: Iterable[Trajectory]) -> dict[str, BranchedAt]:
    """Return the place where each branch leaves its parent, by the branch's rollout id. Branches whose parent is not among the
    trajectories are absent."""
    known = list(trajectories)
    calls = {call.key: (member, call) for member in known for call in member.transitions}
    found = ((member.rollout.id, calls.get(parent)) for member in known if (parent := member.rollout.parent))
    return {branch: BranchedAt(*place) for branch, place in found if place is not None}


@dataclass(frozen=True, slots=True)
class Flaw:
    """Why a call cannot be trained on: `reason` is one of a few fixed names, for counting; `problem` is a clause about this
    call, for messages."""

    reason: str
    problem: str


def is_trained(call: Transition, trainable: bool) -> bool:
    """Whether a call gives tokens to train on: it is of the component of interest (`trainable`), OK, not marked as untrained,
    and has response tokens. Only a trained call can be flawed."""
    return trainable and call.status is CallStatus.OK and len(call.response_ids) > 0 and not call.untrained


def trained_tokens(calls: Iterable[tuple[Transition, bool]]) -> int:
    """Return the number of response tokens of the trained calls. Each call comes with whether it is trainable."""
    return sum(len(call.response_ids) for call, trainable in calls if is_trained(call, trainable))


def turns(trajectory: Trajectory) -> npt.NDArray[np.bool_]:
    """Return which calls are the rollout's turns, shape (calls,): the calls that are trained, or would be if the rollout were
    not masked. If there is none, every call is a turn. Discounts count turns, and a rollout's own mean is over its turns: calls
    of other agents between two turns belong to the environment, and so do untrained calls."""
    flags = trajectory.of_interest or trajectory.trainable
    trained = np.array(list(map(is_trained, trajectory.transitions, flags)), dtype=bool)
    return trained if trained.any() else np.ones(len(trajectory.transitions), dtype=bool)


def find_flaw(call: Transition) -> Flaw | None:
    """Return the first flaw of a call that has response tokens, or None if it can be trained on."""
    tokens = len(call.response_ids)
    if not len(call.prompt_ids):
        return Flaw("no_prompt", "it has no prompt, so its first token has no probability")
    for part, buffer in (("prompt", call.prompt_ids), ("response", call.response_ids)):
        least = int(np.asarray(buffer, dtype=np.int32).min())
        if least < 0:
            return Flaw("bad_token_id", f"its {part} has token id {least}, but ids start at 0")
    if len(call.logprobs) not in (0, tokens):
        return Flaw("lengths_differ", f"it has {tokens} response tokens but {len(call.logprobs)} logprobs")
    if not np.isfinite(np.asarray(call.logprobs, dtype=np.float32)).all():
        return Flaw("logprob_not_finite", "a logprob is not finite")
    if not (np.isfinite(call.temperature) and call.temperature >= 0):
        return Flaw("bad_temperature", f"its temperature is {call.temperature}")
    starts = [run.start for run in call.versions]
    if not starts or starts[0] != 0 or starts != sorted(starts):
        return Flaw("bad_versions", "its policy versions do not begin at response token 0 and go on from there")
    return None


def first_flaw(trajectory: Trajectory) -> tuple[Transition, Flaw] | None:
    """Return the first trained call of a rollout that has a flaw, with the flaw; None if there is no such call."""
    flags = zip(trajectory.transitions, trajectory.trainable, strict=False)
    trained = (call for call, trainable in flags if is_trained(call, trainable))
    return next(((call, flaw) for call in trained if (flaw := find_flaw(call)) is not None), None)
