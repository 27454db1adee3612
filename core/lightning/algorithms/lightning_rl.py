"""LightningRL: credit assignment over calls first, a single-call reinforcement learning algorithm on each call second.

The invariant: rows are a pure function of the finished groups and of the fields below. Groups keep their order, rollouts
their order within a group and calls their order within a rollout, so the same store gives the same batch, byte for byte.

Agent Lightning, arXiv 2508.03680. Left out of GRPO: the KL penalty to a reference model (as DAPO and Dr. GRPO do).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import numpy.typing as npt

from lightning.algorithms.protocol import Batch
from lightning.batch.build import Normalization, build_samples, name_of
from lightning.batch.flaws import Flaw, first_flaw, is_trained
from lightning.batch.trajectory import Group, Trajectory
from lightning.credit.advantage import all_equal, centre, grpo, rloo
from lightning.credit.intermediate import ToolReward, check_tool_reward, with_tool_rewards
from lightning.credit.protocol import Credit, GroupAdvantage, group_returns
from lightning.errors import ConfigError, DataError
from lightning.types import Transition

if TYPE_CHECKING:
    from lightning.losses.protocol import Loss

logger = logging.getLogger(__name__)

LowLevel = Literal["grpo", "dr_grpo", "rloo"]


@dataclass(frozen=True, slots=True)
class LightningRL:
    """Trains every call of the component of interest from the return of its rollout, compared within its group.

    `low_level` is the single-call algorithm: `grpo` (mean and deviation of the group), `dr_grpo` (mean only, weights by a
    constant) or `rloo` (mean of the other rollouts). `group_size` rollouts are sampled per task. `credit` spreads a
    rollout's advantage over its calls: a registered name or a function. `tool_reward` makes tool runs count: a reward for
    each status, such as `{"error": -0.1}`, or a function of the `ToolEvent`; like a `lightning.reward`, what it gives is
    added to the rollout's return. Ratios are clipped to [1 - `clip_low`,
    1 + `clip_high`]. `normalization` None means `rollout-mean`, for `dr_grpo` `constant`: then a rollout's sum over
    tokens is divided by `constant_tokens`. `advantage_eps` is added to GRPO's deviation.

    A rollout with a recorded call that cannot be trained on (`lightning.batch.find_flaw`) is dropped from its group like
    one that failed, counted by reason and logged. Groups are skipped, and counted by reason, when fewer than two of their
    rollouts succeeded (`too_few_succeeded`) or were left after that (`too_few_trainable`), when their returns do not
    differ (`all_rewards_equal`), when no call of theirs belongs to the component of interest (`nothing_to_train`), or when
    the advantage of a trained call is not a finite float32 (`advantage_not_finite`).
    """

    low_level: LowLevel = "grpo"
    _: KW_ONLY
    group_size: int = 8
    credit: str | Credit = "identical"
    tool_reward: ToolReward | None = None
    clip_low: float = 0.2
    clip_high: float = 0.28
    entropy_coefficient: float = 0.0
    normalization: Normalization | None = None
    constant_tokens: int = 1024
    advantage_eps: float = 1e-4

    def __post_init__(self) -> None:
        _one_of("low_level", self.low_level, get_args(LowLevel))
        if self.normalization is not None:
            _one_of("normalization", self.normalization, get_args(Normalization))
        if self.tool_reward is not None:
            check_tool_reward(self.tool_reward)
        if self.group_size < 2:
            raise ConfigError(
                f"group_size={self.group_size}: a rollout is compared with the others of its task, so use 2+"
            )
        if self.constant_tokens < 1:
            raise ConfigError(f"constant_tokens={self.constant_tokens} must be positive")
        if not 0.0 <= self.clip_low <= 1.0 or not self.clip_high >= 0.0:
            raise ConfigError(f"ratios cannot be clipped to [1 - {self.clip_low}, 1 + {self.clip_high}]")

    @property
    def name(self) -> str:
        """The plugin name that makes this algorithm again from its fields."""
        return "lightning_rl"

    @property
    def loss(self) -> Loss:
        """The clipped policy gradient on single tokens."""
        from lightning.losses.policy_gradient import ClippedPolicyGradient

        return ClippedPolicyGradient(self.clip_low, self.clip_high, self.entropy_coefficient)

    def batch(self, groups: Sequence[Group]) -> Batch:
        """The step's rows. Raises `DataError` for a reward that no store accepts, and for a credit function that does not
        give one advantage for each call."""
        credit, estimator = self._credit(), self._estimator()
        skipped, dropped = Counter[str](), _Dropped()
        trajectories: list[Trajectory] = []
        advantages: list[npt.NDArray[np.float64]] = []
        for group in groups:
            _check_rewards(group)
            whole = self._rewarded(dropped.without_flawed(group))
            with np.errstate(over="ignore", invalid="ignore"):  # what overflows is skipped by name
                reason = _reason_to_skip(group, whole)
                values = credit(whole, estimator) if not reason else []
                reason = reason or _reason_to_doubt(whole, values)
            if reason:
                skipped[reason] += 1
                continue
            trajectories.extend(whole.trajectories)
            advantages.extend(values)
        dropped.log()
        samples = build_samples(
            trajectories,
            advantages,
            normalization=self._normalization(),
            constant_tokens=self.constant_tokens,
            drop_zero_advantages=self.entropy_coefficient == 0.0,
        )
        trained = {span.rollout for sample in samples for span in sample.spans}
        used = tuple(trajectory.rollout for trajectory in trajectories if trajectory.rollout.id in trained)
        return Batch(samples, used, dict(skipped), dropped.counts())

    def _rewarded(self, group: Group) -> Group:
        """The group with the rewards that its tools earn."""
        rule = self.tool_reward
        if rule is None:
            return group
        return Group(group.id, tuple(with_tool_rewards(trajectory, rule) for trajectory in group.trajectories))

    def _normalization(self) -> Normalization:
        if self.normalization is not None:
            return self.normalization
        return "constant" if self.low_level == "dr_grpo" else "rollout-mean"

    def _estimator(self) -> GroupAdvantage:
        if self.low_level == "grpo":
            return partial(grpo, eps=self.advantage_eps)
        return centre if self.low_level == "dr_grpo" else rloo

    def _credit(self) -> Credit:
        if not isinstance(self.credit, str):
            return self.credit
        from lightning.plugins import plugins

        return plugins().credit(self.credit)


class _Dropped:
    """The rollouts that have a flawed call, each with the first of them, by reason."""

    def __init__(self) -> None:
        self._calls: dict[str, list[tuple[Transition, Flaw]]] = {}

    def without_flawed(self, group: Group) -> Group:
        """The group without its rollouts that cannot be trained on, which are noted."""
        kept = []
        for trajectory in group.trajectories:
            found = first_flaw(trajectory)
            if found is None:
                kept.append(trajectory)
            else:
                self._calls.setdefault(found[1].reason, []).append(found)
        return group if len(kept) == len(group.trajectories) else Group(group.id, tuple(kept))

    def counts(self) -> dict[str, int]:
        """Rollouts by reason."""
        return {reason: len(calls) for reason, calls in self._calls.items()}

    def log(self) -> None:
        """Name the first culprit of each reason."""
        for reason, calls in self._calls.items():
            call, flaw = calls[0]
            logger.warning(
                "%d rollouts are left out (%s); the first: %s cannot be trained on: %s",
                len(calls),
                reason,
                name_of(call),
                flaw.problem,
            )


def _check_rewards(group: Group) -> None:
    for trajectory in group.trajectories:
        reward = trajectory.rollout.reward
        if reward is None or not np.isfinite(reward):
            raise DataError(
                f"rollout {trajectory.rollout.id} attempt {trajectory.rollout.attempt} has the reward {reward}: "
                "only finite rewards can be trained on"
            )


def _reason_to_skip(group: Group, whole: Group) -> str:
    """Why a group teaches nothing; `whole` is what is left of it when flawed rollouts are dropped."""
    if len(whole.trajectories) < 2:
        return "too_few_succeeded" if len(group.trajectories) < 2 else "too_few_trainable"
    if all_equal(group_returns(whole)):
        return "all_rewards_equal"
    if not any(any(trajectory.trainable) for trajectory in whole.trajectories):
        return "nothing_to_train"
    return ""


def _reason_to_doubt(group: Group, advantages: Sequence[npt.NDArray[np.float64]]) -> str:
    """Why credited advantages cannot be trained on; rows hold them as float32."""
    for trajectory, values in zip(group.trajectories, advantages, strict=False):
        for call, trainable, value in zip(trajectory.transitions, trajectory.trainable, values, strict=False):
            if is_trained(call, trainable) and not np.isfinite(np.float32(value)):
                logger.warning(
                    "group %s is left out: the advantage of %s is %s; check the rewards and the credit function",
                    group.id,
                    name_of(call),
                    value,
                )
                return "advantage_not_finite"
    return ""


def _one_of(field: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        close = get_close_matches(value, allowed, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"unknown {field} {value!r}: use one of {', '.join(allowed)}{hint}")
