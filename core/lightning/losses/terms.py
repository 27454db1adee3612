"""What policy losses are made of: surrogates, KL estimates and importance weights, each a pure function of tokens.

The invariant: every function maps tensors of shape (N,) to a tensor of shape (N,), token by token, so what is composed of
them is a sum over tokens again.
"""

from __future__ import annotations

import torch

from lightning.losses.protocol import KlEstimator

MAX_LOG_RATIO = 20.0
"""exp of more would overflow a sum in float32; such a token is far outside any clip range (verl clamps the same)."""


def clamped(log_ratio: torch.Tensor) -> torch.Tensor:
    """Log ratios of which `exp` is finite in float32."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


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


def truncated_weight(sampler_log_ratio: torch.Tensor, cap: float) -> torch.Tensor:
    """min(pi_trainer / pi_sampler, `cap`), without a gradient: truncated importance sampling for each token.

    "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (https://fengyao.notion.site/off-policy-rl), and
    the weight of the proximal policy against the behaviour policy in AReaL's decoupled objective (arXiv 2505.24298).
    """
    return clamped(sampler_log_ratio.detach()).exp().clamp(max=cap)


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
