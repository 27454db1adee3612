"""DPO: the rollouts of a group are ranked by their returns, and pairs of them trained by preference.

The invariant: rows and pairs are a pure function of the finished groups and of the fields below; a pair's rollouts are of one
task, and the chosen one has earned more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from lightning.algorithms.intake import Intake, reason_to_skip, trains, with_rules
from lightning.algorithms.protocol import Batch
from lightning.batch import Group, Trajectory
from lightning.credit import Returns, ToolReward, check_tool_reward, group_returns
from lightning.errors import ConfigError
from lightning.losses.protocol import Loss

from lightning_finetuning.preference import PreferenceLoss

Pairs = Literal["best-worst", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DPO:
    """Direct preference optimisation (arXiv 2305.18290) on whole rollouts, sampled anew for each step.

    Of the `group_size` rollouts of a task, `pairs` takes the best with the worst, or `all` pairs whose returns differ; in
    either case by more than `margin`. What is compared is the sum of logprobs over all trained calls of a rollout, relative
    to the model that training began with (with `length_normalized` the mean), times `beta`; `label_smoothing` is the share of
    pairs expected to be the wrong way round (`lightning_finetuning.preference.PreferenceLoss` has the formula). Returns are
    what the agents returned, their `lightning.reward`s, and `tool_reward` as of `LightningRL`.

    Dropped and skipped are the same as with `LightningRL`; a group is also skipped when fewer than two of its rollouts have
    something to train (`too_few_trainable`) and when no two of them are further apart than `margin` (`margin_too_small`).
    """

    group_size: int = 8
    pairs: Pairs = "best-worst"
    margin: float = 0.0
    beta: float = 0.1
    label_smoothing: float = 0.0
    length_normalized: bool = False
    tool_reward: ToolReward | None = None

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise ConfigError(f"group_size={self.group_size}: a pair needs two rollouts of one task, so use 2+")
        if self.pairs not in get_args(Pairs):
            raise ConfigError(f"unknown pairs {self.pairs!r}: use one of {', '.join(get_args(Pairs))}")
        if not 0.0 <= self.margin < float("inf"):
            raise ConfigError(f"margin={self.margin} must be a finite number that is not negative")
        self._loss(())  # which refuses what no loss has
        if self.tool_reward is not None:
            check_tool_reward(self.tool_reward)

    @property
    def name(self) -> str:
        """The plugin name that makes this algorithm again from its fields."""
        return "dpo"

    @property
    def loss(self) -> Loss:
        """DPO's loss without any pair; each batch brings its own."""
        return self._loss(())

    def teaches(self, group: Group) -> bool:
        """Whether a group has a pair."""
        return isinstance(self._ranked(group, Intake()), list)

    def batch(self, groups: Sequence[Group]) -> Batch:
        """The rows of all rollouts of the step's pairs, and the loss of these pairs. Raises `DataError` for a reward that no
        store accepts."""
        intake = Intake()
        members: list[Trajectory] = []
        advantages: list[np.ndarray] = []
        pairs: list[tuple[str, str]] = []
        for group in groups:
            ranked = self._ranked(group, intake)
            if isinstance(ranked, str):
                intake.skip(ranked)
                continue
            chosen = [won.rollout.id for won, _ in ranked]
            rejected = [lost.rollout.id for _, lost in ranked]
            pairs.extend(zip(chosen, rejected, strict=True))
            for member in group.trajectories:
                won, lost = chosen.count(member.rollout.id), rejected.count(member.rollout.id)
                if won or lost:
                    members.append(member)
                    advantages.append(np.full(len(member.transitions), float(won - lost)))
        return intake.batch(members, advantages, loss=self._loss(tuple(pairs)))

    def _ranked(self, group: Group, intake: Intake) -> list[tuple[Trajectory, Trajectory]] | str:
        """The pairs of a group, (chosen, rejected), or why there is none."""
        whole = with_rules(intake.sound(group), self.tool_reward)
        if reason := reason_to_skip(group, whole):
            return reason
        able = Group(group.id, tuple(filter(trains, whole.trajectories)))
        if len(able.trajectories) < 2:
            return "too_few_trainable"
        pairs = self._pairs(group_returns(able))
        return [(able.trajectories[won], able.trajectories[lost]) for won, lost in pairs] or "margin_too_small"

    def _pairs(self, returns: Returns) -> list[tuple[int, int]]:
        """Places of (chosen, rejected) in the returns; of equal rollouts the first one counts."""
        if self.pairs == "best-worst":
            candidates = [(int(returns.argmax()), int(returns.argmin()))]
        else:
            places = range(len(returns))
            candidates = [(won, lost) for won in places for lost in places]
        return [(won, lost) for won, lost in candidates if returns[won] - returns[lost] > self.margin]

    def _loss(self, pairs: tuple[tuple[str, str], ...]) -> Loss:
        return PreferenceLoss(pairs, self.beta, self.label_smoothing, self.length_normalized)
