"""Linear and embedding layers whose weights' gradients are added up where they are.

The invariant: results and gradients are those of `nn.Linear` and `nn.Embedding`. Autograd makes a table as large as the
weights for each backward pass, fills it, and adds it to the gradient; of an embedding of 49,152 words it fills and adds 113 MB
for a few hundred tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def add_in_place(model: nn.Module) -> None:
    """Let the plain layers of a model that are trained add up their gradients in place."""
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.requires_grad:
            module.__class__ = AddingLinear
        elif type(module) is nn.Embedding and _is_plain(module):
            module.__class__ = AddingEmbedding


def _is_plain(embedding: nn.Embedding) -> bool:
    """On CUDA `index_add_` has no order of its own, so that no step could be taken again bit for bit."""
    special = embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse
    return embedding.weight.requires_grad and embedding.weight.device.type == "cpu" and not special


class AddingLinear(nn.Linear):
    """(..., in) to (..., out), in the dtype of the autocast that is on."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 — its name in torch
        """See `nn.Linear`."""
        device = input.device.type
        kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.weight.dtype
        result: torch.Tensor = _Linear.apply(input, self.weight, kind)  # type: ignore[no-untyped-call]
        return result if self.bias is None else result + self.bias.to(kind)


class AddingEmbedding(nn.Embedding):
    """(...) ids to (..., H)."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 — its name in torch
        """See `nn.Embedding`."""
        result: torch.Tensor = _Embedding.apply(input, self.weight, self.padding_idx)  # type: ignore[no-untyped-call]
        return result


class _Linear(torch.autograd.Function):
    """given @ weight.T in some dtype."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, weight: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
        low, inputs = weight.to(kind), given.to(kind)
        ctx.save_for_backward(inputs, low)
        ctx.weight, ctx.dtype = weight, given.dtype
        return inputs @ low.T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        inputs, low = ctx.saved_tensors
        weight = ctx.weight
        if ctx.needs_input_grad[1]:
            rows, columns = grad.reshape(-1, grad.shape[-1]), inputs.reshape(-1, inputs.shape[-1])
            if weight.grad is None:
                weight.grad = (rows.T @ columns).to(weight.dtype)
            elif weight.dtype is grad.dtype:
                weight.grad.addmm_(rows.T, columns)
            else:
                weight.grad.add_(rows.T @ columns)
        return (grad @ low).to(ctx.dtype) if ctx.needs_input_grad[0] else None, None, None


class _Embedding(torch.autograd.Function):
    """Rows of a table; that of the padding, where there is one, has no gradient."""

    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight: torch.Tensor, padding: int | None) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding = weight, padding
        return torch.nn.functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None]:
        (ids,) = ctx.saved_tensors
        weight = ctx.weight
        if weight.grad is None:
            weight.grad = weight.new_zeros(weight.shape)
        chosen, rows = ids.flatten(), grad.reshape(-1, grad.shape[-1]).to(weight.dtype)
        if ctx.padding is not None:
            rows = rows.masked_fill((chosen == ctx.padding)[:, None], 0)
        weight.grad.index_add_(0, chosen, rows)
        return None, None, None
