"""The algorithm `dpo` and its loss: rank the rollouts of a group by their returns, and train pairs of them by preference.

The invariant: rows and pairs depend only on the finished groups and the fields of `DPO`. The rollouts of a pair are of one
task, and the chosen one has the higher return. The loss does not depend on how a pair's tokens are split over rows and
micro-batches: the factor of a pair (how wrong the policy is about it) is prepared once for the whole step, and each token then
has its own share of the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import numpy as np
import numpy.typing as npt
from lightning.algorithms.intake import Intake, reason_to_skip, trains, with_rules
from lightning.algorithms.protocol import Batch
from lightning.batch import Group, Trajectory
from lightning.config import refuses_unknown
from lightning.credit import Returns, ToolReward, check_tool_reward, group_returns
from lightning.errors import ConfigError, EngineError
from lightning.losses.protocol import Loss, LossOutput, StepTokens, TokenBatch

Pairs = Literal["best-worst", "all"]

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PreferenceLoss:
    """DPO (arXiv 2305.18290, equation 7), averaged over `pairs` of rollout ids, (chosen, rejected):

        -(1 - e) log sigmoid(h) - e log sigmoid(-h),   h = beta * (m(chosen) - m(rejected))

    m is the rollout's margin over the reference: the sum over its trained tokens of logprob - reference logprob, or with
    `length_normalized` their mean. e is `label_smoothing`, the chance that a pair is the wrong way round (conservative DPO,
    https://ericmitchell.ai/cdpo.pdf).

    The gradient of the mean over pairs is a sum over tokens of (d loss / d m(rollout)) * grad logprob_t. The first factor
    depends only on the present policy: `prepare` returns it, divided by the token's weight. Calling the loss then gives
    sum_t w_t * (loss of the step + prepared_t * (logprob_t - sg[logprob_t])), where sg stops the gradient. Over a step whose
    weights add up to 1, its value is DPO's loss and its gradient DPO's gradient. `prepare` keeps the loss and the other numbers
    of the pairs in this object; a copy that prepared nothing has the same gradient and reports the value 0.
    """

    pairs: tuple[tuple[str, str], ...] = ()
    beta: float = 0.1
    label_smoothing: float = 0.0
    length_normalized: bool = False
    _measured: dict[str, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    needs_reference: ClassVar[bool] = True
    over_all_tokens: ClassVar[bool] = True
    whole_step: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (math.isfinite(self.beta) and self.beta > 0.0):
            raise ConfigError(f"beta={self.beta} must be positive: it scales the margin over the reference model")
        if not 0.0 <= self.label_smoothing < 0.5:
            raise ConfigError(
                f"label_smoothing={self.label_smoothing} must lie in [0, 0.5): it is the share of wrong pairs"
            )

    def prepare(self, step: StepTokens) -> npt.NDArray[np.floating]:
        """Return, for each token, d loss / d m of its rollout, divided by the token's weight, shape (N,). Raises `EngineError`
        without reference logprobs, or if a rollout of a pair has no token in the step."""
        if step.reference is None:
            raise EngineError("DPO needs the reference model's logprobs, and the engine gave none")
        names = list(dict.fromkeys(span.rollout for span in step.spans))
        place = {name: index for index, name in enumerate(names)}
        if missing := {name for pair in self.pairs for name in pair} - place.keys():
            raise EngineError(f"the rollout {min(missing)} is part of a pair, but has no token in the step")
        rollout = np.array([place[span.rollout] for span in step.spans], dtype=np.int64)[step.calls]
        margins = np.bincount(rollout, step.logprobs.astype(np.float64) - step.reference, len(names))
        share = np.bincount(rollout, minlength=len(names)) if self.length_normalized else np.ones(len(names))
        chosen = np.array([place[name] for name, _ in self.pairs], dtype=np.int64)
        rejected = np.array([place[name] for _, name in self.pairs], dtype=np.int64)
        found = margins / np.maximum(share, 1)
        slope = self._slope(found[chosen], found[rejected], float(step.weights.sum(dtype=np.float64)))
        slopes = np.bincount(chosen, slope, len(names)) - np.bincount(rejected, slope, len(names))
        token: npt.NDArray[np.floating] = (slopes / np.maximum(share, 1))[rollout] / step.weights
        return token

    def _slope(self, chosen: Numbers, rejected: Numbers, weight: float) -> Numbers:
        """Return d loss / d m(chosen) of each pair, shape (pairs,), and keep the pairs' metrics in `_measured`. `weight` is the
        sum of the step's weights."""
        h, e, count = self.beta * (chosen - rejected), self.label_smoothing, max(1, len(chosen))
        losses = (1 - e) * np.logaddexp(0.0, -h) + e * np.logaddexp(0.0, h)
        wrong = np.exp(-np.logaddexp(0.0, h))  # sigmoid(-h)
        measured = {
            "dpo_loss": losses,
            "dpo_accuracy": h > 0,
            "dpo_margin": h,
            "dpo_chosen": self.beta * chosen,
            "dpo_rejected": self.beta * rejected,
        }
        self._measured.clear()
        # The engine divides weighted sums by the step's weight for its metrics, but not the loss.
        self._measured.update({name: float(np.sum(values)) / count for name, values in measured.items()})
        self._measured["loss"] = self._measured["dpo_loss"] / (weight or 1.0)
        slope: Numbers = self.beta / count * (e * (1.0 - wrong) - (1.0 - e) * wrong)
        return slope

    def __call__(self, batch: TokenBatch) -> LossOutput:
        """Return the loss and, if this object prepared the step, `dpo_loss`, `dpo_accuracy` (share of pairs that the policy
        ranks right, relative to the reference), `dpo_margin` (mean h), `dpo_chosen` and `dpo_rejected` (beta * m: DPO's
        implicit rewards). Raises `EngineError` if the batch was not prepared."""
        if batch.prepared is None:
            raise EngineError("DPO has to be prepared for the step, and the engine did not do that")
        weight = float(batch.weights.detach().sum())
        carrier = batch.weights * batch.prepared * (batch.logprobs - batch.logprobs.detach())
        known = dict(self._measured)
        loss = carrier.sum() + weight * known.pop("loss", 0.0)
        return LossOutput(loss, {name: weight * value for name, value in known.items()})


@refuses_unknown
@dataclass(frozen=True, slots=True, kw_only=True)
class DPO:
    """Direct preference optimisation (arXiv 2305.18290) on whole rollouts, sampled anew for each step.

    From the `group_size` rollouts of a task, `pairs` takes the best with the worst, or `all` pairs; the returns of a pair must
    differ by more than `margin`. The loss compares, for each rollout, the sum of logprobs over its trained calls relative to
    the model that training began with (the mean with `length_normalized`), times `beta`. `label_smoothing` is the share of
    pairs expected to be the wrong way round (`PreferenceLoss` has the formula). A return is the
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
