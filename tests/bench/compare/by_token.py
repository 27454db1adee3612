"""What differs within a call, as a user writes it: a credit by token, and a loss that looks at entropies (docs/credit.md,
docs/algorithms.md)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from lightning.algorithms import Algorithm, from_loss
from lightning.batch import Group
from lightning.credit.protocol import group_returns
from lightning.losses.protocol import StepTokens, TokenBatch

LAST = 8
"""Tokens at the end of an answer."""


def last_tokens(group: Group, advantage: Callable[[np.ndarray], np.ndarray]) -> list[list[np.ndarray]]:
    """The last tokens of each answer get all of its credit."""
    credited = []
    for trajectory, value in zip(group.trajectories, advantage(group_returns(group)), strict=True):
        places = [np.arange(len(call.response_ids)) for call in trajectory.transitions]
        credited.append([value * (place >= len(place) - LAST) for place in places])
    return credited


class TopEntropy:
    """Train the fifth of a step's tokens that the model doubts most (arXiv 2506.01939)."""

    def prepare(self, step: StepTokens) -> np.ndarray:
        return step.entropy >= np.quantile(step.entropy, 0.8)

    def __call__(self, tokens: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        ratio = (tokens.logprobs - tokens.old_logprobs).exp()
        clipped = ratio.clamp(0.8, 1.28)
        loss = -torch.minimum(ratio * tokens.advantages, clipped * tokens.advantages)
        return loss * tokens.prepared, {"kept": tokens.prepared}


def top_entropy(**arguments: object) -> Algorithm:
    """GRPO with `TopEntropy` as its loss."""
    return from_loss(TopEntropy())("grpo", **arguments)
