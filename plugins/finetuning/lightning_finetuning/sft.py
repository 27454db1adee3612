"""The algorithm `sft`: supervised fine-tuning on the policy's own best rollouts (rejection sampling).

The invariant: rows depend only on the finished groups and the fields below. Only rollouts that were selected by their return
are imitated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, get_args

import numpy as np
from lightning.algorithms.intake import Intake, reason_to_skip, trains, with_rules
from lightning.algorithms.protocol import Batch
from lightning.batch import Group, Normalization, Trajectory
from lightning.config import refuses_unknown
from lightning.credit import ToolReward, check_tool_reward, group_returns
from lightning.errors import ConfigError
from lightning.losses.protocol import Loss, LossOutput, TokenBatch


@dataclass(frozen=True, slots=True)
class NegativeLogLikelihood:
    """The loss of supervised fine-tuning, sum_t w_t * -logprob_t. Advantages and old logprobs are not used. Logprobs are
    over all tokens, so that the format of answers under a grammar is learned too."""

    over_all_tokens: ClassVar[bool] = True

    def __call__(self, batch: TokenBatch) -> LossOutput:
        """Return the weighted sum over tokens. The engine reports its weighted mean over the step as `loss`."""
        return LossOutput(-(batch.weights * batch.logprobs).sum())


@refuses_unknown
@dataclass(frozen=True, slots=True, kw_only=True)
class SFT:
    """Supervised fine-tuning on the best rollouts (RAFT, arXiv 2304.06767; expert iteration).

    From the `group_size` rollouts of a task, those with a return of at least `threshold` (None: any) are taken, and of these
    the `best` ones by number (None: all). Every trained call of theirs is imitated, at the temperature it was sampled with. Of
    equal returns the first rollouts count. Returns, `tool_reward` and `normalization` are as in `LightningRL`, but
    `normalization` cannot be `constant`.

    Rollouts are dropped and groups skipped as in `LightningRL`. A group is also skipped if none of its rollouts is selected
    (`below_threshold`). With a threshold, the returns of a group may be equal. Without one, rollouts with the group's lowest
    return are never imitated, however few rollouts succeeded.
    """

    group_size: int = 8
    best: int | None = 1
    threshold: float | None = None
    normalization: Normalization = "rollout-mean"
    tool_reward: ToolReward | None = None

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ConfigError(f"group_size={self.group_size} must be positive")
        if self.best is not None and self.best < 1:
            raise ConfigError(f"best={self.best} must be positive: so many rollouts of each group are imitated")
        if self.threshold is None and (self.best is None or self.best >= self.group_size):
            raise ConfigError(
                f"best={self.best} of group_size={self.group_size} without a threshold would imitate every rollout: give a "
                "threshold, or a smaller `best`"
            )
        if self.threshold is not None and not np.isfinite(self.threshold):
            raise ConfigError(f"threshold={self.threshold} must be a finite number")
        if self.normalization == "constant" or self.normalization not in get_args(Normalization):
            raise ConfigError(
                f"normalization {self.normalization!r} is not one of token-mean, rollout-mean, sequence-mean"
            )
        if self.tool_reward is not None:
            check_tool_reward(self.tool_reward)

    @property
    def name(self) -> str:
        """The registered name from which this algorithm is made again with its fields."""
        return "sft"

    @property
    def loss(self) -> Loss:
        """The loss of supervised fine-tuning: the negative log likelihood."""
        return NegativeLogLikelihood()

    def teaches(self, group: Group) -> bool:
        """Return whether at least one rollout of a group is imitated."""
        return isinstance(self._selected(group, Intake()), list)

    def batch(self, groups: Sequence[Group]) -> Batch:
        """Return the rows of the selected rollouts. Raises `DataError` for a reward that no store accepts."""
        intake = Intake()
        members: list[Trajectory] = []
        for group in groups:
            selected = self._selected(group, intake)
            if isinstance(selected, str):
                intake.skip(selected)
            else:
                members.extend(selected)
        advantages = [np.ones(len(member.transitions)) for member in members]
        return replace(intake.batch(members, advantages, normalization=self.normalization), algorithm=self)

    def _selected(self, group: Group, intake: Intake) -> list[Trajectory] | str:
        """Return the rollouts of a group to imitate, in the group's order, or the reason why there is none."""
        whole = with_rules(intake.sound(group), self.tool_reward)
        if reason := reason_to_skip(group, whole, least=2 if self.threshold is None else 1):
            return reason
        returns = group_returns(whole)
        ranking = [int(place) for place in np.argsort(-returns, kind="stable") if trains(whole.trajectories[place])]
        if self.threshold is None:
            ranking = [place for place in ranking if returns[place] > returns.min()]
        else:
            ranking = [place for place in ranking if returns[place] >= self.threshold]
        return [whole.trajectories[place] for place in sorted(ranking[: self.best])] or "below_threshold"
