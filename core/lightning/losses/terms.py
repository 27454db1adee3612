"""What losses are made of: surrogates, KL estimates and importance weights of tokens, and the critic's loss of states.

The invariant: a function of tokens maps tensors of shape (N,) to a tensor of shape (N,), token by token, so what is composed of
them is a sum over tokens again. The critic's loss, and the numbers from which `value_metrics` tells how good the critic is, are
sums over states in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lightning.losses.correction import Correction
from lightning.losses.protocol import KlEstimator, LossOutput

ROUNDING = float(torch.finfo(torch.float32).eps) ** 2
"""The variance of what differs in its last float32 digits alone, as a part of its square."""

MAX_LOG_RATIO = 20.0
"""exp of more would overflow a sum in float32; such a token is far outside any clip range (verl clamps the same)."""


def clamped(log_ratio: torch.Tensor) -> torch.Tensor:
    """Log ratios of which `exp` is finite in float32."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def dual_clipped(objective: torch.Tensor, advantages: torch.Tensor, bound: float) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's objective, bounded where the advantage is negative and the ratio above `bound`, and which tokens are bounded:
    max(J, `bound` · A) there (dual-clip PPO, Ye et al., arXiv 1912.09729). Such a token has no gradient."""
    floor = bound * advantages
    bounded = (advantages < 0) & (objective < floor)
    return torch.where(bounded, floor, objective), bounded


def clip_surrogate(
    log_ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's clipped objective (arXiv 1707.06347, equation 7) with separate bounds (DAPO, arXiv 2503.14476, equation 8), to be
    maximised, and which tokens are clipped: min(ratio · A, clip(ratio, 1 - `low`, 1 + `high`) · A)."""
    ratio = clamped(log_ratio).exp()
    clipped = ratio.clamp(1.0 - low, 1.0 + high)
    return torch.minimum(ratio * advantages, clipped * advantages), clipped * advantages < ratio * advantages


def cispo_surrogate(
    logprobs: torch.Tensor, log_ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """CISPO's objective (arXiv 2506.13585, equations 4 and 5), to be maximised, and which tokens are clipped:
    sg[clip(ratio, 1 - `low`, 1 + `high`)] · A · log pi. A clipped token keeps a gradient, of bounded weight."""
    ratio = clamped(log_ratio.detach()).exp()
    weight = ratio.clamp(1.0 - low, 1.0 + high)
    return weight * advantages * logprobs, weight != ratio


def importance_weight(log_rho: torch.Tensor, correction: Correction) -> torch.Tensor:
    """c of `Correction` where nothing is masked, without a gradient: min(rho, `high`) or rho, and 1 where the surrogate's own
    ratio is against the sampler."""
    if not correction.decoupled:
        return torch.ones_like(log_rho)
    return clamped(log_rho.detach()).exp().clamp(max=correction.bounds[1])


def reference_kl(logprobs: torch.Tensor, reference: torch.Tensor, estimator: KlEstimator) -> torch.Tensor:
    """An estimate of KL(pi || pi_ref) at each token, with the gradient that `KlEstimator` tells of."""
    difference = logprobs - reference
    if estimator == "k3":
        bounded = difference.clamp(min=-MAX_LOG_RATIO)
        return torch.expm1(-bounded) + bounded
    squared = difference.square() / 2
    return squared if estimator == "k2" else difference.detach() + squared - squared.detach()


def sampler_kl(sampler_log_ratio: torch.Tensor) -> torch.Tensor:
    """k3 of KL(pi_sampler || pi): ratio - 1 - log ratio, at tokens that the sampler chose."""
    bounded = clamped(sampler_log_ratio)
    return torch.expm1(bounded) - bounded


OF_BOTH = frozenset({"approx_kl", "ratio", "ratio_max"})
"""What is measured of trainer and sampler, and of nothing else."""


def mismatch_metrics(means: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a step with `ess` in the place of the means of rho and rho²: the effective sample size of the sampler's
    tokens for the trainer's policy, as a share of them, (E rho)² / E rho² (Kish, Survey Sampling, 1965). 1 where
    both agree. It, `approx_kl` and `ratio` are of the tokens that have a sampler's logprob (`old_logprob_share`; in the means
    all others stand as if both agreed), and absent where none has."""
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
    """sum_i w_i * (V_i - target_i)^2 / 2, all of shape (M,): L^VF of PPO (arXiv 1707.06347, section 5).

    Left out: clipping of V to its old value, which did not help where it was measured (arXiv 2006.05990, section 3.2).
    `metrics` are the weighted sums that `value_metrics` takes. They are made in float64, on the CPU, since some devices have
    none: a variance is the small difference of two of them, which float32 would lose where targets are nearly equal.
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
    """`value_loss` (mean squared error / 2), `value_mean`, `value_target` (the targets' mean) and
    `value_explained_variance`: 1 - Var(target - V) / Var(target), which is 1 for a perfect critic and 0 for a constant one;
    0 where all targets are equal, but for the rounding of float32. Takes the added-up `metrics` of all of a step's states;
    empty without any."""
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
