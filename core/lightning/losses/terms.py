"""What policy losses are made of: surrogates, KL estimates and importance weights, each a pure function of tokens.

The invariant: every function maps tensors of shape (N,) to a tensor of shape (N,), token by token, so what is composed of
them is a sum over tokens again.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lightning.losses.correction import Correction
from lightning.losses.protocol import KlEstimator

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


def mismatch_metrics(means: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a step with `ess` in the place of the means of rho and rho²: the effective sample size of the sampler's
    tokens for the trainer's policy, as a share of them, (E rho)² / E rho² (Kish, Survey Sampling, 1965). 1 where
    both agree."""
    found = dict(means)
    first, second = found.pop("rho", None), found.pop("rho_squared", None)
    if first is not None and second is not None:
        found["ess"] = first * first / second if second else 1.0
    return found
