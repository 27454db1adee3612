"""The part that all algorithms share: dropping what cannot be trained on, counting it, and adding rule-based rewards.

The invariant: nothing is left out silently. A rollout that cannot be trained on is dropped and counted, and the log names the
first of each kind; a group that teaches nothing is skipped and counted (`lightning.trainer.metrics` explains the reasons).
Rewards of tools and penalties of long answers are a pure function of recorded data, and do not change the record.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lightning.algorithms.protocol import Batch
from lightning.batch.build import (
    MAX_ADVANTAGE,
    Advantages,
    Normalization,
    PerToken,
    beyond,
    build_samples,
    name_of,
    wrong_length,
)
from lightning.batch.trajectory import Flaw, Group, Trajectory, first_flaw, inherited, is_trained, trained_tokens
from lightning.credit.advantage import ROUNDING, all_equal
from lightning.credit.intermediate import ToolReward, with_tool_rewards
from lightning.credit.protocol import group_returns
from lightning.errors import ConfigError, DataError
from lightning.losses.custom_loss import as_loss
from lightning.losses.protocol import Loss
from lightning.types import Transition

if TYPE_CHECKING:
    from lightning.losses.policy_gradient import OwnLoss


logger = logging.getLogger(__name__)


class Intake:
    """The intake of one step's groups: call `sound` with each group, `skip` for each group that is left out, and at last
    `batch`."""

    def __init__(self) -> None:
        self._skipped: Counter[str] = Counter()
        self._idle = 0
        self._flawed: dict[str, list[tuple[Transition, Flaw]]] = {}

    def sound(self, group: Group) -> Group:
        """Return the group without rollouts that have a flawed call (`lightning.batch.find_flaw`) or, if they are no branches,
        no call at all (idle ones), and count these. An idle rollout's reward is no effect of the policy, so it is in no
        baseline.

        Raises `DataError` for a reward that is missing or not finite.
        """
        kept = []
        for trajectory in group.trajectories:
            _check_reward(trajectory)
            if not trajectory.transitions and trajectory.rollout.parent is None:
                self._idle += 1
                continue
            found = first_flaw(trajectory)
            if found is None:
                kept.append(trajectory)
            else:
                self._flawed.setdefault(found[1].reason, []).append(found)
        return group if len(kept) == len(group.trajectories) else Group(group.id, tuple(kept))

    def skip(self, reason: str, count: int = 1) -> None:
        """Count groups as left out for a reason."""
        self._skipped[reason] += count

    def batch(
        self,
        trajectories: Sequence[Trajectory],
        advantages: Advantages,
        *,
        normalization: Normalization = "rollout-mean",
        constant_tokens: int | None = None,
        drop_zero_advantages: bool = False,
        value_targets: Sequence[Sequence[float] | npt.NDArray[np.floating]] | None = None,
        value_coefficient: float = 1.0,
        loss: Loss | OwnLoss | None = None,
    ) -> Batch:
        """Return the batch of these rollouts, with the counts of what was skipped and dropped. The arguments are those of
        `build_samples`, but `loss`: the loss of this batch alone, a `Loss` or a function that returns one loss for each token;
        None uses the algorithm's.
        """
        for reason, calls in self._flawed.items():
            call, flaw = calls[0]
            logger.warning(
                "%d rollouts are left out (%s); the first: %s cannot be trained on: %s",
                len(calls),
                reason,
                name_of(call),
                flaw.problem,
            )
        samples = build_samples(
            trajectories,
            advantages,
            normalization=normalization,
            constant_tokens=constant_tokens,
            drop_zero_advantages=drop_zero_advantages,
            value_targets=value_targets,
            value_coefficient=value_coefficient,
        )
        trained = {span.rollout for sample in samples for span in sample.spans}
        used = tuple(trajectory.rollout for trajectory in trajectories if trajectory.rollout.id in trained)
        dropped = {reason: len(calls) for reason, calls in self._flawed.items()}
        dropped |= {"idle": self._idle} if self._idle else {}
        own = None if loss is None else as_loss(loss, "Intake.batch(loss=...)")
        return Batch(samples, used, dict(self._skipped), dropped, own)


def trains(trajectory: Trajectory) -> bool:
    """Whether a rollout has a call of the component of interest with tokens to train on."""
    return any(map(is_trained, trajectory.transitions, trajectory.trainable))


def reason_to_skip(found: Group, whole: Group, *, least: int = 2) -> str:
    """Return why a group teaches nothing, or "" if it teaches something. `whole` is the group `found` without the rollouts that
    `Intake.sound` dropped, and with all rewards added.

    `too_few_succeeded` and `too_few_trainable`: fewer than `least` rollouts, before and after flawed and idle rollouts are
    dropped · `return_not_finite` · `all_rewards_equal`: only if `least` is above 1, because else rollouts are not compared (the
    advantages of single calls may still differ: `are_rounding`) · `nothing_to_train`: no call of the component of interest.
    """
    if len(whole.trajectories) < least:
        if len(found.trajectories) < least:
            return "too_few_succeeded"
        return "too_few_trainable" if any(map(trains, found.trajectories)) else "nothing_to_train"
    with np.errstate(over="ignore", invalid="ignore"):
        returns = group_returns(whole)
        if not np.isfinite(returns).all():
            return "return_not_finite"
        if least > 1 and all_equal(returns):
            return "all_rewards_equal"
    return "" if any(map(trains, whole.trajectories)) else "nothing_to_train"


def reward_scale(group: Group) -> float:
    """Return the largest sum of absolute rewards of a rollout in the group; the rounding of returns is relative to this
    number."""
    return max(
        (abs(member.reward) + sum(abs(step.value) for step in member.step_rewards) for member in group.trajectories),
        default=0.0,
    )


def are_rounding(group: Group, advantages: Advantages) -> bool:
    """Whether the advantages of a group's trained calls are all 0 up to rounding, relative to 1 or to the rewards if these are
    larger. NaN counts as 0, because equal rewards divided by their deviation of 0 give NaN."""
    most = ROUNDING * max(1.0, reward_scale(group))
    return not any(
        is_trained(call, trainable) and np.any(np.abs(value) > most)
        for trajectory, values in zip(group.trajectories, advantages, strict=True)
        for call, trainable, value in zip(trajectory.transitions, trajectory.trainable, values, strict=False)
    )


def per_call(
    group: Group, given: object, credit: str, what: str = "advantage", *, by_token: bool = True
) -> list[list[PerToken]]:
    """Return `given`, the result of the credit function called `credit` for a group, as one list for each trajectory: a number
    for each call or, with `by_token`, an array with one for each token of its response.

    Raises `DataError`, naming the function, for any other result: a number for each rollout, too many lists, None. The error
    for an array of another length than its response names rollout, attempt and call.
    """
    counts = [len(trajectory.transitions) for trajectory in group.trajectories]
    cause: Exception | None = None
    try:
        parts = list(given)  # type: ignore[call-overload]
        found, lists = [np.asarray(part, dtype=object).shape for part in parts], [_numbers(part) for part in parts]
    except (TypeError, ValueError, RuntimeError) as error:  # torch raises the last for a tensor with a gradient
        cause, said = error, f"{given!r:.200} ({error})"
    else:
        if [shape[:1] for shape in found] == [(count,) for count in counts] and (
            by_token or not any(np.ndim(value) for values in lists for value in values)
        ):
            _check_lengths(group, lists, credit)
            return lists
        said = f"numbers of the shapes {found}"
    raise DataError(
        f"the credit function {credit} gave {said} for group {group.id}, whose rollouts have {counts} "
        f"calls: credit must give one {what} for each call, in one array for each rollout"
    ) from cause


def one_per_call(advantages: Sequence[PerToken]) -> list[float]:
    """Return one advantage for each call: of a call that has one for each token their mean, 0 if it has no token."""
    return [float(np.mean(value)) if np.size(value) else 0.0 for value in advantages]


def _numbers(part: Sequence[PerToken] | npt.NDArray[np.floating]) -> list[PerToken]:
    """Return a trajectory's advantages as a list: of numbers where there is one for each call, else of arrays."""
    with suppress(ValueError):  # answers of different lengths, or numbers beside arrays
        whole = np.asarray(part, dtype=np.float64)
        if whole.ndim < 2:
            return [*np.atleast_1d(whole)]
    return [np.asarray(value, dtype=np.float64) for value in part]


def _check_lengths(group: Group, parts: Sequence[Sequence[PerToken]], credit: str) -> None:
    for trajectory, values in zip(group.trajectories, parts, strict=True):
        for call, value in zip(trajectory.transitions, values, strict=True):
            if length := wrong_length(call, np.asarray(value)):
                raise DataError(
                    f"the credit function {credit} gave {length} of {name_of(call)}: it must give one number for the call, or "
                    "one for each token of its response"
                )


def reason_to_doubt(group: Group, numbers: Advantages, what: str = "advantage") -> str:
    """Return why the numbers of a credit function cannot be trained on, or "" if they can: the number of a trained call is not
    finite (`WHAT_not_finite`), or is beyond `MAX_ADVANTAGE`, so that its square would overflow float32 (`WHAT_too_large`)."""
    for trajectory, values in zip(group.trajectories, numbers, strict=True):
        for call, trainable, value in zip(trajectory.transitions, trajectory.trainable, values, strict=False):
            if is_trained(call, trainable) and (wrong := beyond(value)) is not None:
                logger.warning(
                    "group %s is left out: the %s of %s is %s, and at most %g can be trained on; check the rewards and the "
                    "credit function",
                    group.id,
                    what.replace("_", " "),
                    name_of(call),
                    wrong,
                    MAX_ADVANTAGE,
                )
                return f"{what}_too_large" if np.isfinite(wrong) else f"{what}_not_finite"
    return ""


def _check_reward(trajectory: Trajectory) -> None:
    reward = trajectory.rollout.reward
    if reward is None or not np.isfinite(reward):
        raise DataError(
            f"rollout {trajectory.rollout.id} attempt {trajectory.rollout.attempt} has the reward {reward}: "
            "only finite rewards can be trained on"
        )


@dataclass(frozen=True, slots=True)
class Overlong:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), times `penalty`, of the number of tokens in all trained
    calls of a rollout, in a branch with the repeated calls of its parent: 0 up to `max_tokens` - `buffer`, from there falling
    linearly to -1 at `max_tokens`, and -1 beyond."""

    max_tokens: int
    buffer: int = 0
    penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or not 0 <= self.buffer <= self.max_tokens:
            raise ConfigError(
                f"overlong_tokens={self.max_tokens} with overlong_buffer={self.buffer}: the tokens a rollout may generate "
                "must be positive, and the buffer lies inside them"
            )
        if not 0.0 <= self.penalty < float("inf"):
            raise ConfigError(f"overlong_penalty={self.penalty} must be a finite number that is not negative")

    def __call__(self, tokens: int) -> float:
        """Return the punishment of a rollout that generated `tokens` tokens: a number from -`penalty` to 0."""
        over = tokens - (self.max_tokens - self.buffer)
        if over <= 0:
            return 0.0
        return -self.penalty * (min(1.0, over / self.buffer) if self.buffer else 1.0)


def with_rules(group: Group, tool_reward: ToolReward | None = None, overlong: Overlong | None = None) -> Group:
    """Return the group with the rewards of its tool runs added as step rewards, and the punishment of overlong rollouts added
    to the agents' rewards. None leaves a rule out."""
    members = group.trajectories
    if tool_reward is not None:
        members = tuple(with_tool_rewards(member, tool_reward) for member in members)
    if overlong is not None:
        before = {branch: trained_tokens(calls) for branch, calls in inherited(members).items()}
        members = tuple(_punished(member, overlong, before.get(member.rollout.id, 0)) for member in members)
    return group if members is group.trajectories else Group(group.id, members)


def _punished(trajectory: Trajectory, overlong: Overlong, before: int) -> Trajectory:
    own = trained_tokens(zip(trajectory.transitions, trajectory.trainable, strict=True))
    punishment = overlong(before + own)
    if not punishment:
        return trajectory
    return replace(trajectory, rollout=replace(trajectory.rollout, reward=trajectory.reward + punishment))
