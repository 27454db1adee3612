"""The terms of losses: surrogates, KL estimates and importance weights of tokens, and the critic's loss over states.

The invariant: a function of tokens maps tensors of shape (N,) to a tensor of shape (N,), token by token, so a loss that is
composed of them is a sum over tokens. The critic's loss, and the numbers from which `value_metrics` computes the critic's
quality, are sums over states in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lightning.losses.correction import Correction
from lightning.losses.protocol import KlEstimator, LossOutput

ROUNDING = float(torch.finfo(torch.float32).eps) ** 2
"""Relative to their mean square, the variance of numbers that differ only by the rounding of float32."""

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to this absolute value: exp of more would overflow a sum in float32. Such a token is far outside any
clip range (verl clamps the same)."""


def clamped(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return the log ratios clamped to ±`MAX_LOG_RATIO`, so that `exp` of them is finite in float32."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def dual_clipped(objective: torch.Tensor, advantages: torch.Tensor, bound: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return PPO's objective J, bounded to max(J, `bound` · A) where the advantage is negative (dual-clip PPO, Ye et al., arXiv
    1912.09729), and which tokens are bounded. Such a token has no gradient; its ratio is above `bound`."""
    floor = bound * advantages
    bounded = (advantages < 0) & (objective < floor)
    return torch.where(bounded, floor, objective), bounded


def clip_surrogate(
    log_ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return PPO's clipped objective (arXiv 1707.06347, equation 7) with separate bounds (DAPO, arXiv 2503.14476, equation 8),
    to be maximised: min(ratio · A, clip(ratio, 1 - `low`, 1 + `high`) · A); and which tokens are clipped."""
    ratio = clamped(log_ratio).exp()
    clipped = ratio.clamp(1.0 - low, 1.0 + high)
    return torch.minimum(ratio * advantages, clipped * advantages), clipped * advantages < ratio * advantages


def cispo_surrogate(
    logprobs: torch.Tensor, log_ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return CISPO's objective (arXiv 2506.13585, equations 4 and 5), to be maximised:
    sg[clip(ratio, 1 - `low`, 1 + `high`)] · A · log pi; and which tokens are clipped. A clipped token keeps its gradient, with
    a bounded weight."""
    ratio = clamped(log_ratio.detach()).exp()
    weight = ratio.clamp(1.0 - low, 1.0 + high)
    return weight * advantages * logprobs, weight != ratio


def importance_weight(log_rho: torch.Tensor, correction: Correction) -> torch.Tensor:
    """Return the weight c of a `Correction` for tokens that are not masked, without a gradient: min(rho, `high`) with the
    decoupled kinds, else 1, because the surrogate's own ratio is against the sampler."""
    if not correction.decoupled:
        return torch.ones_like(log_rho)
    return clamped(log_rho.detach()).exp().clamp(max=correction.bounds[1])


def reference_kl(logprobs: torch.Tensor, reference: torch.Tensor, estimator: KlEstimator) -> torch.Tensor:
    """Return an estimate of KL(pi || pi_ref) at each token, shape (N,), with the gradient that `KlEstimator` describes."""
    difference = logprobs - reference
    if estimator == "k3":
        bounded = difference.clamp(min=-MAX_LOG_RATIO)
        return torch.expm1(-bounded) + bounded
    squared = difference.square() / 2
    return squared if estimator == "k2" else difference.detach() + squared - squared.detach()


def sampler_kl(sampler_log_ratio: torch.Tensor) -> torch.Tensor:
    """Return the estimate k3 of KL(pi_sampler || pi) at each sampled token: ratio - 1 - log ratio."""
    bounded = clamped(sampler_log_ratio)
    return torch.expm1(bounded) - bounded


OF_BOTH = frozenset({"approx_kl", "ratio", "ratio_max"})
"""The metrics that compare trainer and sampler, and mean nothing without the sampler's logprobs."""


def mismatch_metrics(means: Mapping[str, float]) -> dict[str, float]:
    """Return the means of a step's metrics with `ess` in the place of the means of rho and rho². `ess` is the effective sample
    size of the sampler's tokens for the trainer's policy, as a share of them: (E rho)² / E rho² (Kish, Survey Sampling, 1965);
    1 means that both agree. `ess`, `approx_kl` and `ratio` are rescaled to the tokens that have a sampler's logprob (their
    share is `old_logprob_share`; the given means count all others as if both agreed), and absent if no token has one."""
    found = dict(means)
    share = found.get("old_logprob_share", 1.0)
    moments = [found.pop(name, None) for name in ("rho", "rho_squared")]
    if not share:
        return {name: value for name, value in found.items() if name not in OF_BOTH}
    first, second = (None if each is None else 1.0 + (each - 1.0) / share for each in moments)
    if first is not None and second:
        found["ess"] = first * first / second
    if "approx_kl" in found:
        found["approx_kl"] /= share
    if "ratio" in found:
        found["ratio"] = 1.0 + (found["ratio"] - 1.0) / share
    return found


def value_loss(values: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> LossOutput:
    """Return sum_i w_i * (V_i - target_i)^2 / 2 over M states, L^VF of PPO (arXiv 1707.06347, section 5). All have shape (M,).

    V is not clipped to its old value, because that did not help in measurements (arXiv 2006.05990, section 3.2). The `metrics`
    are the weighted sums that `value_metrics` takes. They are computed in float64, since a variance is a small difference of
    two of them, which float32 would lose if targets are nearly equal; and on the CPU, since some devices have no float64.
    """
    loss = (weights * (values - targets).square()).sum() / 2
    value, target, weight = (part.detach().to("cpu", torch.float64) for part in (values, targets, weights))
    error = target - value
    powers = {
        "weight": torch.ones_like(weight),
        "value": value,
        "target": target,
        "target_squared": target.square(),
        "error": error,
        "error_squared": error.square(),
    }
    return LossOutput(loss, {name: float((weight * power).sum()) for name, power in powers.items()})


def value_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Return a step's metrics of the critic from the added-up `metrics` of `value_loss`; empty if the step has no states.

    They are `value_loss` (mean squared error / 2), `value_mean`, `value_target` (the targets' mean) and
    `value_explained_variance`: 1 - Var(target - V) / Var(target), which is 1 for a perfect critic and 0 for a constant one, and
    0 if all targets are equal up to the rounding of float32."""
    weight = sums.get("weight", 0.0)
    if not weight:
        return {}
    mean = {name: value / weight for name, value in sums.items()}
    spread = mean["target_squared"] - mean["target"] ** 2
    unexplained = max(0.0, mean["error_squared"] - mean["error"] ** 2)
    return {
        "value_loss": mean["error_squared"] / 2,
        "value_mean": mean["value"],
        "value_target": mean["target"],
        "value_explained_variance": 1.0 - unexplained / spread if spread > ROUNDING * mean["target_squared"] else 0.0,
    }
