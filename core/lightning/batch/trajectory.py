"""Finished rollouts as the learning algorithms see them, and what can be wrong with one of their calls.

The invariant: a flaw belongs to one call alone. It does not depend on the model, the reward or on other calls, so a rollout
that has one can be left out before anything is computed from its group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning.types import CallStatus, Rollout, StepReward, ToolEvent, Transition


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One succeeded rollout with everything recorded about it. `transitions` are its answered calls in `seq` order;
    `trainable[i]` says whether call i belongs to the component of interest. With a critic, `values[i]` is its value of call
    i's state before the step (NaN for calls that are not trained); without one `values` is empty. `refused` are the
    calls of which the gateway or vLLM did not take the request, `lost` those whose answer the agent did not get whole: what
    plugins keep with others may be told against them, and in a branch against `parent_calls`: all calls of the attempt that it
    begins as, none where they are not in the store. A masked rollout has no trainable call; `of_interest` then says which would
    be."""

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
        """What the reward function gave."""
        assert self.rollout.reward is not None, "only succeeded rollouts become trajectories"
        return self.rollout.reward


@dataclass(frozen=True, slots=True)
class Group:
    """The trajectories of one task (GRPO's group), in `rollout.index` order; failed rollouts are absent."""

    id: str
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True)
class BranchedAt:
    """Where a branch left its parent: at the call `call` of the trajectory `parent`."""

    parent: Trajectory
    call: Transition

    @property
    def prefix(self) -> tuple[Transition, ...]:
        """The parent's calls that the branch was answered from the record. The branch's own calls come after them."""
        return tuple(call for call in self.parent.transitions if is_prefix(call, self.call))


def inherited(members: Iterable[Trajectory]) -> dict[str, tuple[tuple[Transition, bool], ...]]:
    """The calls that each branch, by its rollout id, has from its parent, with whether they are trainable, those that the
    parent has from its own included. Branches whose parent is not among the members are absent."""
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
    """Whether a branch at the call `at` is answered another call of the same rollout from the record: it had been answered
    when `at` was sent. Calls that were still under way are sampled anew."""
    return call.seq < at.seq and call.ended_at <= at.started_at


def begins_at(calls: Sequence[Transition], at: Transition) -> bool:
    """Whether one of a branch's own calls was answered and has the prompt of the call at which it branches, token for token."""
    return any(call.status.answered and call.prompt_ids == at.prompt_ids for call in calls)


def branched_at(trajectories: Iterable[Trajectory]) -> dict[str, BranchedAt]:
    """Where each branch left its parent, by the branch's rollout id. Branches whose parent is not among the trajectories
    are absent."""
    known = list(trajectories)
    calls = {call.key: (member, call) for member in known for call in member.transitions}
    found = ((member.rollout.id, calls.get(parent)) for member in known if (parent := member.rollout.parent))
    return {branch: BranchedAt(*place) for branch, place in found if place is not None}


@dataclass(frozen=True, slots=True)
class Flaw:
    """`reason` is one of a few words to count by, `problem` says it of this very call."""

    reason: str
    problem: str


def is_trained(call: Transition, trainable: bool) -> bool:
    """Whether a call of the component of interest (`trainable`) gives tokens to train on: only such a call can be flawed."""
    return trainable and call.status is CallStatus.OK and len(call.response_ids) > 0


def trained_tokens(calls: Iterable[tuple[Transition, bool]]) -> int:
    """Response tokens of the calls that are trained, of calls with whether they are trainable."""
    return sum(len(call.response_ids) for call, trainable in calls if is_trained(call, trainable))


def turns(trajectory: Trajectory) -> npt.NDArray[np.bool_]:
    """Which calls are the rollout's turns, shape (calls,): those that are trained, or would be were the rollout not masked, and
    every one where all are of other agents. Discounts count turns, and a rollout's own mean is over its turns: what other
    agents call between two of them belongs to the environment."""
    flags = trajectory.of_interest or trajectory.trainable
    trained = np.array(list(map(is_trained, trajectory.transitions, flags)), dtype=bool)
    return trained if trained.any() else np.ones(len(trajectory.transitions), dtype=bool)


def find_flaw(call: Transition) -> Flaw | None:
    """The first flaw of a call that has response tokens, or None when it can be trained on."""
    tokens = len(call.response_ids)
    if not len(call.prompt_ids):
        return Flaw("no_prompt", "it has no prompt, so its first token has no probability")
    for part, buffer in (("prompt", call.prompt_ids), ("response", call.response_ids)):
        least = int(np.frombuffer(buffer, dtype=np.int32).min())
        if least < 0:
            return Flaw("bad_token_id", f"its {part} has token id {least}, but ids start at 0")
    if len(call.logprobs) not in (0, tokens):
        return Flaw("lengths_differ", f"it has {tokens} response tokens but {len(call.logprobs)} logprobs")
    if not np.isfinite(np.frombuffer(call.logprobs, dtype=np.float32)).all():
        return Flaw("logprob_not_finite", "a logprob is not finite")
    if not (np.isfinite(call.temperature) and call.temperature >= 0):
        return Flaw("bad_temperature", f"its temperature is {call.temperature}")
    starts = [run.start for run in call.versions]
    if not starts or starts[0] != 0 or starts != sorted(starts):
        return Flaw("bad_versions", "its policy versions do not begin at response token 0 and go on from there")
    return None


def first_flaw(trajectory: Trajectory) -> tuple[Transition, Flaw] | None:
    """The first trained call of a rollout that has a flaw, or None when all can be trained on."""
    for call, trainable in zip(trajectory.transitions, trajectory.trainable, strict=False):
        flaw = find_flaw(call) if is_trained(call, trainable) else None
        if flaw is not None:
            return call, flaw
    return None
