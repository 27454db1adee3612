"""What a loss function sees and returns.

The invariant: a loss is a sum over tokens of `weights * something`, so that how tokens are split over calls changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The trained tokens of one micro-batch, flat, as torch tensors of shape (N,): what a loss function sees."""

    logprobs: torch.Tensor
    """Current policy's logprobs of the sampled tokens; the gradient flows through it."""
    old_logprobs: torch.Tensor
    """Logprobs the ratio is taken against (the sampler's where known, else the current ones detached)."""
    advantages: torch.Tensor
    weights: torch.Tensor
    entropy: torch.Tensor
    """Entropy (nats) of the current policy at each token, differentiable."""
    has_old: torch.Tensor
    """Bool: the sampler gave a logprob for this token."""


@dataclass(frozen=True, slots=True)
class LossOutput:
    """`loss` is a scalar: the weighted *sum* over the micro-batch's tokens. `metrics` are weighted sums too (detached); the
    engine divides them by the sum of the step's weights. Names that end in `_max` are maxima instead."""

    loss: torch.Tensor
    metrics: Mapping[str, float] = field(default_factory=dict)


class Loss(Protocol):
    """A pure function from tokens to a loss. It must be a sum over tokens of `weights * something`, so that splitting
    the tokens over calls changes nothing."""

    def __call__(self, batch: TokenBatch) -> LossOutput:
        """The loss of some of a step's tokens, and its metrics."""
