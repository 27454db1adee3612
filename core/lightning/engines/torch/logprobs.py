"""Logprobs and entropies of wanted tokens from hidden states, without keeping a full table of logits.

The invariant: only wanted positions pass the output layer, at most `CHUNK_ELEMENTS` logits exist at once, and both results
are differentiable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = 1 << 26
"""Logits computed at once (256 MiB in float32); further chunks are computed again in the backward pass."""

Logits = Callable[[torch.Tensor], torch.Tensor]


def token_logprobs(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    temperatures: torch.Tensor | None,
    logits: Logits,
    vocab_size: int,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs of `targets` (N,) and entropies (N,), in nats, under softmax(logits(hidden) / temperature).

    `hidden` has shape (N, H). Results are float32, or float64 where the logits are.
    """

    def some(part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        scores = logits(hidden[part])
        if scores.dtype not in (torch.float32, torch.float64):
            scores = scores.float()
        if temperatures is not None:
            scores = scores / temperatures[part, None].to(scores.dtype)
        result: tuple[torch.Tensor, torch.Tensor] = _LogprobEntropy.apply(scores, targets[part])  # type: ignore[no-untyped-call]
        return result

    size = max(1, chunk_elements // vocab_size)
    if len(hidden) <= size:
        return some(slice(None))
    parts = [slice(start, start + size) for start in range(0, len(hidden), size)]
    if torch.is_grad_enabled():
        results = [checkpoint(some, part, use_reentrant=False) for part in parts]
    else:
        results = [some(part) for part in parts]
    return torch.cat([pair[0] for pair in results]), torch.cat([pair[1] for pair in results])


class _LogprobEntropy(torch.autograd.Function):
    """log p[target] and H = -sum p log p of each row of logits, keeping only log p for the backward pass.

    d log p[t] / d z_j = 1[j = t] - p_j and d H / d z_j = -p_j (log p_j + H): the entropy costs nothing unless it is used.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        log_p = torch.log_softmax(logits, dim=-1)
        # The clamp makes a masked token's 0 * -inf the 0 it stands for.
        entropy = -(log_p.exp() * log_p.clamp_min(torch.finfo(log_p.dtype).min)).sum(-1)
        ctx.save_for_backward(log_p, targets, entropy)
        ctx.set_materialize_grads(False)
        return log_p.gather(-1, targets[:, None]).squeeze(-1), entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        log_p, targets, entropy = ctx.saved_tensors
        by_logprob, by_entropy = grads
        p = log_p.exp()
        grad = None
        if by_entropy is not None:
            grad = (torch.special.entr(p) - p * entropy[:, None]) * by_entropy[:, None]
        if by_logprob is not None:
            direct = p.mul_(-by_logprob[:, None])
            direct.scatter_add_(-1, targets[:, None], by_logprob[:, None])
            grad = direct if grad is None else grad + direct
        return grad, None
