"""A user's loss that is sent to workers, which import this file alone."""

from __future__ import annotations

import torch
from lightning.losses.correction import NO_CORRECTION
from lightning.losses.policy_gradient import ClippedPolicyGradient
from lightning.losses.protocol import LossOutput, TokenBatch

LOSS = ClippedPolicyGradient(0.2, 0.28, entropy_coefficient=0.01, correction=NO_CORRECTION)


class Sharper:
    """LOSS, and a push on the eight most probable tokens, of which those with an even id get twice as much."""

    needs_top_logprobs = 8

    def __call__(self, batch: TokenBatch) -> LossOutput:
        """Return the loss, with the chances of these tokens as a metric."""
        assert batch.top_logprobs is not None
        assert batch.top_ids is not None
        chances = (batch.top_logprobs.exp() * (2 - batch.top_ids % 2)).sum(-1)
        found, pushed = LOSS(batch), batch.weights * chances
        return LossOutput(found.loss + 0.1 * pushed.sum(), {**found.metrics, "pushed": float(torch.sum(pushed))})
