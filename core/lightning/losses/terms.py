"""The terms of losses: surrogates, KL estimates and importance weights of tokens.

The invariant: a function of tokens maps tensors of shape (N,) to a tensor of shape (N,), token by token, so a loss that is
composed of them is a sum over tokens.
"""

from __future__ import annotations

import torch

from lightning.losses.correction import Correction
from lightning.losses.protocol import KlEstimator

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
