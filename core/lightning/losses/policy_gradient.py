"""The policy gradient losses, composed of pure functions of tokens: a clipped surrogate, a KL penalty, an entropy bonus and
importance weights.

The invariant: the result is a sum over tokens of `weights * something`. A token without a sampler's logprob is treated as
on-policy when a step begins (its ratio is 1, with a gradient), and does not change the terms of other tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import torch

from lightning.config.arguments import refuses_unknown
from lightning.errors import ConfigError, EngineError
from lightning.losses.correction import MASKED, Correction, of_calls
from lightning.losses.protocol import (
    KlEstimator,
    LossOutput,
    StepTokens,
    TokenBatch,
    name_of,
    needs_reference,
    needs_top_logprobs,
    over_all_tokens,
    said_by,
)
from lightning.losses.terms import (
    cispo_surrogate,
    clamped,
    clip_surrogate,
    dual_clipped,
    importance_weight,
    reference_kl,
    sampler_kl,
)

OwnLoss: TypeAlias = "Callable[[TokenBatch], torch.Tensor | tuple[torch.Tensor, Mapping[str, torch.Tensor]]]"
"""A user's loss: a pure function from tokens to one loss for each, shape (N,), differentiable in `logprobs`. It may return
metrics of its own beside: `(loss, {"name": values})` with a value for each token, shape (N,), of numbers or bools. The step's
metric of that name is their weighted mean, or their maximum if the name ends in `_max`.

Optional attributes: `needs_reference = True`, which fills in `TokenBatch.reference`, `needs_top_logprobs = k`, which fills in
`TokenBatch.top_logprobs` and `top_ids`, `over_all_tokens = True`, with which logprobs are over all tokens also where the
sampler drew among some, and a method `prepare` like `StepLoss`'s."""

Surrogate: TypeAlias = "Literal['clip', 'cispo'] | OwnLoss"

OwnMetrics: TypeAlias = "dict[str, torch.Tensor]"

Parts: TypeAlias = "tuple[torch.Tensor, torch.Tensor, torch.Tensor, OwnMetrics]"


@refuses_unknown
@dataclass(frozen=True, slots=True)
class ClippedPolicyGradient:
    """The policy gradient loss, which minimises

        sum_t w_t * ( -c_t * J_t  +  kl_coefficient * KL_t  -  entropy_coefficient * H_t )

    J_t is the surrogate of token t: `clip` (PPO, DAPO), `cispo`, or minus a user's own function. Its ratio is
    exp(logprob_t - old_logprob_t), where the old policy is the one that sampled the token. If a batch is trained on once, this
    ratio is that of trainer and sampler, and differs from 1 only by their mismatch and the sampler's age.

    `correction` bounds the effect of that ratio, and c_t is its weight (`lightning.losses.correction.Correction`). By default a
    token whose ratio is implausible is masked (c_t = 0), and dual clipping removes the gradient of a token with a negative
    advantage at a large ratio, which PPO does not bound. With the decoupled kinds (`tis`, `mis`, `icepop`) the old policy is
    the trainer at the step's start, which is the current policy: J's ratio is 1, nothing is clipped, and no further forward
    pass is needed.

    KL_t is the `kl_estimator` of KL(pi || reference). A `kl_coefficient` above 0, or a user's surrogate that has
    `needs_reference = True`, makes the engine open a reference model. Neither KL nor entropy is weighted by c_t.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    entropy_coefficient: float = 0.0
    surrogate: Surrogate = "clip"
    kl_coefficient: float = 0.0
    kl_estimator: KlEstimator = "k2"
    correction: Correction = field(default_factory=Correction)

    def __post_init__(self) -> None:
        if not 0.0 <= self.clip_low <= 1.0:
            raise ConfigError(
                f"clip_low={self.clip_low} must lie between 0 and 1: the ratio is kept above 1 - clip_low"
            )
        if not self.clip_high >= 0.0:
            raise ConfigError(f"clip_high={self.clip_high} must not be negative: the ratio is kept below 1 + clip_high")
        if not (0.0 <= self.kl_coefficient < math.inf and math.isfinite(self.entropy_coefficient)):
            raise ConfigError(
                f"kl_coefficient={self.kl_coefficient} and entropy_coefficient={self.entropy_coefficient} must be finite, and "
                "the first not negative"
            )
        if self.kl_estimator not in get_args(KlEstimator):
            raise ConfigError(
                f"unknown kl_estimator {self.kl_estimator!r}: use one of {', '.join(get_args(KlEstimator))}"
            )
        if self.correction.level != "token" and not isinstance(self, (CallCorrected, SequencePolicyGradient)):
            raise ConfigError(
                f"a correction of the level {self.correction.level!r} needs a `prepare`, which CallCorrected has. A loss "
                "with a `prepare` of its own can only be corrected by tokens: set level = 'token'"
            )

    @property
    def needs_reference(self) -> bool:
        """Whether the loss needs the reference model's logprobs."""
        return self.kl_coefficient != 0.0 or needs_reference(self.surrogate)

    @property
    def needs_top_logprobs(self) -> int | None:
        """The number of most probable tokens whose logprobs the user's surrogate wants; None for none."""
        return needs_top_logprobs(self.surrogate) or None

    @property
    def over_all_tokens(self) -> bool:
        """Whether the user's surrogate is over all tokens, also where a mask was sampled under."""
        return over_all_tokens(self.surrogate)

    def __call__(self, batch: TokenBatch) -> LossOutput:
        """Return the loss with its metrics: as weighted sums `clip_fraction`, `dual_clip_fraction`, `masked_share`,
        `correction_weight` (c), `approx_kl` (k3 of the sampler's policy to the current one), `rho` and `rho_squared` (of single
        tokens; the engine makes `ess` from them), `entropy`, `ratio` and `old_logprob_share` (the share of tokens with a
        sampler's logprob), and `ratio_max` as a maximum. With a KL penalty also `reference_kl`, with the correction `tis` also
        `truncated_share`."""
        current, weights, correction = batch.logprobs.detach(), batch.weights, self.correction
        old = torch.where(batch.old_logprobs.isnan(), current, batch.old_logprobs)
        sampled = current - old
        log_rho = self._log_rho(batch, sampled)
        masked = self._masked(batch, log_rho)
        # From here masked tokens are computed as on-policy tokens: c = 0 times a value that is not finite would be NaN.
        kept = replace(batch, logprobs=torch.where(masked, old, batch.logprobs))
        token = kept.logprobs - old
        if correction.decoupled:
            kept = replace(kept, old_logprobs=current)
            token = torch.where(masked, 0.0, batch.logprobs - current)
        log_ratio = self._log_ratio(kept, token)
        surrogate, is_clipped, is_bounded, own = self._surrogate_loss(kept, log_ratio)
        weight = torch.where(masked, 0.0, importance_weight(log_rho, correction))
        loss = weight * surrogate
        ratio = torch.where(masked, clamped(sampled).exp(), clamped(log_ratio.detach()).exp())
        # The metrics count a token without a sampler's logprob as if both agreed, whatever its ratio is taken against.
        compared = torch.where(batch.has_old, sampled, 0.0)
        rho = clamped(compared).exp()
        seen = {
            "clip_fraction": is_clipped & ~masked,
            "dual_clip_fraction": is_bounded & ~masked,
            "masked_share": masked,
            "correction_weight": weight,
            "approx_kl": sampler_kl(compared),
            "rho": rho,
            "rho_squared": rho.square(),
            "entropy": batch.entropy.detach(),
            "ratio": torch.where(batch.has_old, ratio, 1.0),
            "old_logprob_share": batch.has_old,
        }
        if correction.kind == "tis":
            seen["truncated_share"] = correction.outside(log_rho)
        if self.kl_coefficient:
            if batch.reference is None:
                raise EngineError("a KL penalty needs the reference model's logprobs, and the engine gave none")
            penalty = reference_kl(batch.logprobs, batch.reference, self.kl_estimator)
            loss = loss + self.kl_coefficient * penalty
            seen["reference_kl"] = penalty.detach()
        if self.entropy_coefficient:
            loss = loss - self.entropy_coefficient * batch.entropy
        seen["ratio_max"] = torch.where(batch.has_old, ratio, 0.0)
        if same := seen.keys() & own:
            raise ConfigError(
                f"the loss {name_of(self.surrogate)} reports the metric {min(same)!r}, which is reported of every loss: choose "
                "another name"
            )
        values = torch.stack([_summed(name, each, weights) for name, each in (seen | own).items()]).tolist()
        return LossOutput((weights * loss).sum(), dict(zip([*seen, *own], values, strict=True)))

    def _log_rho(self, batch: TokenBatch, sampled: torch.Tensor) -> torch.Tensor:
        """Return the log ratio (N,) of trainer and sampler to correct: here that of single tokens, `sampled`."""
        return sampled

    def _masked(self, batch: TokenBatch, log_rho: torch.Tensor) -> torch.Tensor:
        """Return which tokens (N,) are masked, so that their surrogate is 0."""
        if not self.correction.masks:
            return batch.has_old.new_zeros(batch.has_old.shape)
        outside: torch.Tensor = self.correction.outside(log_rho)
        return outside

    def _log_ratio(self, batch: TokenBatch, token: torch.Tensor) -> torch.Tensor:
        """Return the log ratio (N,) to clip: here that of single tokens, `token`."""
        return token

    def _surrogate_loss(self, batch: TokenBatch, log_ratio: torch.Tensor) -> Parts:
        """Return minus the surrogate, which tokens are clipped, which are bounded by dual clipping, and the metrics of a user's
        own surrogate; each has shape (N,)."""
        bounds, none = (self.clip_low, self.clip_high), batch.has_old.new_zeros(batch.has_old.shape)
        if self.surrogate == "clip":
            objective, is_clipped = clip_surrogate(log_ratio, batch.advantages, *bounds)
            if self.correction.dual_clip is None:
                return -objective, is_clipped, none, {}
            objective, is_bounded = dual_clipped(objective, batch.advantages, self.correction.dual_clip)
            return -objective, is_clipped, is_bounded, {}
        if self.surrogate == "cispo":
            objective, is_clipped = cispo_surrogate(batch.logprobs, log_ratio, batch.advantages, *bounds)
            return -objective, is_clipped, none, {}
        loss, own = checked(said_by(self.surrogate, batch), self.surrogate, batch)
        return loss, none, none, own


@refuses_unknown
@dataclass(frozen=True, slots=True)
class CallCorrected(ClippedPolicyGradient):
    """The policy gradient loss with a correction of whole calls: of the `level` "sequence" or "geometric"."""

    def prepare(self, step: StepTokens) -> npt.NDArray[np.floating]:
        """Return log rho of each token's call, shape (N,), in float64."""
        return self.correction.log_ratios(step)

    def _log_rho(self, batch: TokenBatch, sampled: torch.Tensor) -> torch.Tensor:
        return _prepared(batch)


@refuses_unknown
@dataclass(frozen=True, slots=True)
class SequencePolicyGradient(ClippedPolicyGradient):
    """GSPO (arXiv 2507.18071): all tokens of a call have one ratio, so either all of them are clipped or none.

    s = exp(mean over the call's tokens of logprob_t - old_logprob_t) (equation 7), and token t has the ratio
    s_t = sg[s] * pi_t / sg[pi_t] (GSPO-token, equations 13 and 14). Its value is s; with one advantage for the whole call its
    gradient is GSPO's; but each token may also have an advantage of its own. Masked tokens are left out of the mean, so that an
    implausible token does not change the ratio of its call.

    A call for which the sampler gave no logprobs has the ratio 1. Clip bounds are much narrower than those of single tokens:
    the paper has 3e-4 and 4e-4.
    """

    def __post_init__(self) -> None:
        super(SequencePolicyGradient, self).__post_init__()
        if self.correction.decoupled:
            raise ConfigError(
                f"a correction of the kind {self.correction.kind!r} cannot be used with ratios of whole calls, which would "
                "all be 1, since its old policy is the trainer: use ClippedPolicyGradient or CallCorrected"
            )

    def prepare(self, step: StepTokens) -> npt.NDArray[np.floating]:
        """Return log s of each token's call, shape (N,), in float64; `MASKED` where a token is masked."""
        difference = step.logprobs.astype(np.float64) - step.old_logprobs
        masked = np.zeros(len(difference), bool)
        if self.correction.masks:
            masked = self.correction.outside(self.correction.log_ratios(step))
        return np.where(masked, MASKED, of_calls(step, difference, mean=True, kept=~masked))

    def _masked(self, batch: TokenBatch, log_rho: torch.Tensor) -> torch.Tensor:
        return _prepared(batch) <= MASKED / 2

    def _log_ratio(self, batch: TokenBatch, token: torch.Tensor) -> torch.Tensor:
        return _prepared(batch) + (batch.logprobs - batch.logprobs.detach())


@refuses_unknown
@dataclass(frozen=True, slots=True)
class PreparedPolicyGradient(ClippedPolicyGradient):
    """The policy gradient loss with a user's surrogate that has a method `prepare`, whose numbers the surrogate then finds in
    `TokenBatch.prepared`."""

    @property
    def preparer(self) -> object:
        """The user's object whose `prepare` is called, for messages."""
        return self.surrogate.func if isinstance(self.surrogate, partial) else self.surrogate

    def prepare(self, step: StepTokens) -> npt.NDArray[np.floating]:
        """Return the numbers of the surrogate's `prepare`, shape (N,). With a decoupled correction its `old_logprobs` are the
        current ones, as in the loss itself."""
        surrogate: Any = self.surrogate
        return np.asarray(
            surrogate.prepare(replace(step, old_logprobs=step.logprobs) if self.correction.decoupled else step)
        )


def _prepared(batch: TokenBatch) -> torch.Tensor:
    if batch.prepared is None:
        raise EngineError("ratios of whole calls must be prepared before the update, and the engine did not do that")
    return batch.prepared


def _summed(name: str, values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of a metric's values, shape (N,). If its name ends in `_max`, return the largest value of a token
    with a weight, or 0 without any."""
    if not name.endswith("_max"):
        return (weights * values).sum()
    known = values[weights != 0]
    return known.max() if len(known) else values.new_zeros(())


def checked(said: object, function: object, batch: TokenBatch) -> tuple[torch.Tensor, OwnMetrics]:
    """Return the losses and the metrics that a user's function returned. Raises `ConfigError`, naming the function, unless they
    are one loss, and one finite value of each metric, for each token."""
    values, metrics = said if isinstance(said, tuple) and len(said) == 2 else (said, {})
    shape = batch.logprobs.shape
    if not (isinstance(values, torch.Tensor) and values.shape == shape and isinstance(metrics, Mapping)):
        only = isinstance(values, torch.Tensor) and isinstance(metrics, Mapping)
        what = f"a tensor of shape {tuple(getattr(values, 'shape', ()))}" if only else f"{said!r:.200}"
        raise ConfigError(
            f"the loss {name_of(function)} returned {what} for {len(batch.logprobs)} tokens: it has to return one loss for "
            "each token, and must not add them up; with metrics of its own it returns (loss, {'name': values})"
        )
    found = {}
    for name, given in metrics.items():
        if not isinstance(given, torch.Tensor) or given.shape != shape or not bool(torch.isfinite(given).all()):
            fault = f"a tensor of shape {tuple(given.shape)}" if isinstance(given, torch.Tensor) else f"{given!r}"
            fault = "a value that is not finite" if getattr(given, "shape", None) == shape else fault
            raise ConfigError(
                f"the loss {name_of(function)} gave {fault} for its metric {name!r}: it has to give one finite value for each "
                f"of the {len(batch.logprobs)} tokens, and must not add them up"
            )
        found[str(name)] = given.detach().to(values.dtype)
    return values, found
