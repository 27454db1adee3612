"""The algorithm `dpo`: rank the rollouts of a group by their returns, and train pairs of them by preference.

The invariant: rows and pairs depend only on the finished groups and the fields below. The rollouts of a pair are of one task,
and the chosen one has the higher return.
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

    From the `group_size` rollouts of a task, `pairs` takes the best with the worst, or `all` pairs; the returns of a pair must
    differ by more than `margin`. The loss compares, for each rollout, the sum of logprobs over its trained calls relative to
    the model that training began with (the mean with `length_normalized`), times `beta`. `label_smoothing` is the share of
    pairs expected to be the wrong way round (`lightning_finetuning.preference.PreferenceLoss` has the formula). A return is the
    agent's reward plus its `lightning.reward`s and `tool_reward`, as in `LightningRL`.

    Rollouts are dropped and groups skipped as in `LightningRL`. A group is also skipped if fewer than two of its rollouts have
    something to train (`too_few_trainable`), or if no two returns differ by more than `margin` (`margin_too_small`).
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
        self._loss(())  # it raises `ConfigError` for values that no loss accepts
        if self.tool_reward is not None:
            check_tool_reward(self.tool_reward)

    @property
    def name(self) -> str:
        """The registered name from which this algorithm is made again with its fields."""
        return "dpo"

    @property
    def loss(self) -> Loss:
        """DPO's loss without pairs; each batch has a loss with its own pairs."""
        return self._loss(())

    def teaches(self, group: Group) -> bool:
        """Return whether a group has a pair to train on."""
        return isinstance(self._ranked(group, Intake()), list)

    def batch(self, groups: Sequence[Group]) -> Batch:
        """Return the rows of all rollouts in the step's pairs, with the loss of these pairs. Raises `DataError` for a reward
        that no store accepts."""
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
        """Return the pairs of a group as (chosen, rejected), or the reason why there is none."""
        whole = with_rules(intake.sound(group), self.tool_reward)
        if reason := reason_to_skip(group, whole):
            return reason
        able = Group(group.id, tuple(filter(trains, whole.trajectories)))
        if len(able.trajectories) < 2:
            return "too_few_trainable"
        pairs = self._pairs(group_returns(able))
        return [(able.trajectories[won], able.trajectories[lost]) for won, lost in pairs] or "margin_too_small"

    def _pairs(self, returns: Returns) -> list[tuple[int, int]]:
        """Return the pairs as indices (chosen, rejected) in `returns`; of equal returns the first one counts."""
        if self.pairs == "best-worst":
            candidates = [(int(returns.argmax()), int(returns.argmin()))]
        else:
            places = range(len(returns))
            candidates = [(won, lost) for won in places for lost in places]
        return [(won, lost) for won, lost in candidates if returns[won] - returns[lost] > self.margin]

    def _loss(self, pairs: tuple[tuple[str, str], ...]) -> Loss:
        return PreferenceLoss(pairs, self.beta, self.label_smoothing, self.length_normalized)
