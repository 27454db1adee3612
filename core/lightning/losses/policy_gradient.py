"""The clipped policy gradient, as a pure function of tokens.

The invariant: the result is a sum over tokens of `weights * something`; a token whose sampler gave no logprob is treated as
on-policy (its ratio is exactly 1, with a gradient), and changes nothing for the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning.errors import ConfigError
from lightning.losses.protocol import LossOutput, TokenBatch

MAX_LOG_RATIO = 20.0
"""exp of more would overflow a sum in float32; such a token is far outside any clip range (verl clamps the same)."""


@dataclass(frozen=True, slots=True)
class ClippedPolicyGradient:
    """PPO's clipped surrogate (arXiv 1707.06347, eq. 7) with DAPO's separate bounds (arXiv 2503.14476, eq. 8):

        sum_t w_t * ( -min(ratio_t * A_t, clip(ratio_t, 1 - clip_low, 1 + clip_high) * A_t) - entropy_coefficient * H_t )

    where ratio_t = exp(logprob_t - old_logprob_t). Left out: a KL penalty, and PPO's value loss (no critic).
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    entropy_coefficient: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.clip_low <= 1.0:
            raise ConfigError(
                f"clip_low={self.clip_low} must lie between 0 and 1: the ratio is kept above 1 - clip_low"
            )
        if not self.clip_high >= 0.0:
            raise ConfigError(f"clip_high={self.clip_high} must not be negative: the ratio is kept below 1 + clip_high")

    def __call__(self, batch: TokenBatch) -> LossOutput:
        """The loss and, as weighted sums, `clip_fraction`, `approx_kl` (k3, http://joschu.net/blog/kl-approx.html),
        `entropy`, `ratio` and `old_logprob_share` (tokens that have a sampler logprob); `ratio_max` is a maximum."""
        logprobs, advantages, weights = batch.logprobs, batch.advantages, batch.weights
        old = torch.where(batch.has_old, batch.old_logprobs, logprobs.detach())
        log_ratio = (logprobs - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        loss = -torch.minimum(ratio * advantages, clipped * advantages)
        if self.entropy_coefficient:
            loss = loss - self.entropy_coefficient * batch.entropy
        with torch.no_grad():
            is_clipped = clipped * advantages < ratio * advantages
            sums = torch.stack([
                (weights * is_clipped).sum(),
                (weights * (ratio - 1.0 - log_ratio)).sum(),
                (weights * batch.entropy).sum(),
                (weights * ratio).sum(),
                (weights * batch.has_old).sum(),
                ratio.max() if len(ratio) else ratio.sum(),
            ])  # fmt: skip
        names = ("clip_fraction", "approx_kl", "entropy", "ratio", "old_logprob_share", "ratio_max")
        return LossOutput((weights * loss).sum(), dict(zip(names, sums.tolist(), strict=True)))
