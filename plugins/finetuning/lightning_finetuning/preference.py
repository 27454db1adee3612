"""The loss of direct preference optimisation over whole rollouts, computed as a sum over tokens.

The invariant: the result does not depend on how a pair's tokens are split over rows and micro-batches. The factor of a pair
(how wrong the policy is about it) is prepared once for the whole step; each token then has its own share of the gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from lightning.errors import ConfigError, EngineError
from lightning.losses.protocol import LossOutput, StepTokens, TokenBatch

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
