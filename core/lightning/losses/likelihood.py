"""The likelihood loss: make what was sampled more likely, whatever it was sampled from.

The invariant: a sum over tokens of `weights * something`.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning.losses.protocol import LossOutput, TokenBatch


@dataclass(frozen=True, slots=True)
class NegativeLogLikelihood:
    """sum_t w_t * -logprob_t: supervised fine-tuning. Advantages and old logprobs play no part."""

    def __call__(self, batch: TokenBatch) -> LossOutput:
        """The loss; its weighted mean over the step is what the engine reports as `loss`."""
        return LossOutput(-(batch.weights * batch.logprobs).sum())
