"""Muon: momentum whose matrices are made orthogonal before they are applied (Keller Jordan et al., 2024,
https://kellerjordan.github.io/posts/muon).

Matrices of one shape are stacked and treated together: for many tiny matrices on a CPU that is several times faster than
one by one, and changes nothing else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

_A, _B, _C = 3.4445, -4.7750, 2.0315
"""Coefficients of the quintic Newton-Schulz iteration, from the source above."""


def orthogonalize(matrices: torch.Tensor, steps: int = 4) -> torch.Tensor:
    """Push the singular values of each matrix towards 1. `matrices` is (B, m, n) with m <= n, the result too."""
    x: torch.Tensor = matrices / (matrices.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    for _ in range(steps):
        a = x @ x.transpose(1, 2)  # (B, m, m)
        b = torch.baddbmm(a, a, a, beta=_B, alpha=_C)
        x = torch.baddbmm(x, b, x, beta=_A)
    return x


class Muon(torch.optim.Optimizer):
    """For matrices only; give embeddings, output layers and vectors to AdamW."""

    def __init__(
        self, params: Iterable[torch.nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.05
    ) -> None:
        super().__init__(list(params), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Apply one update. Nesterov momentum; the step is scaled by sqrt(rows / columns) where that exceeds 1."""
        for group in self.param_groups:
            stacks: dict[tuple[int, int], list[tuple[torch.nn.Parameter, torch.Tensor]]] = defaultdict(list)
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                momentum = state.setdefault("momentum", torch.zeros_like(weight))
                momentum.lerp_(weight.grad, 1 - group["momentum"])
                update = weight.grad.lerp(momentum, group["momentum"])
                if update.shape[0] > update.shape[1]:
                    update = update.T
                stacks[(update.shape[0], update.shape[1])].append((weight, update))
            for entries in stacks.values():
                directions = orthogonalize(torch.stack([update for _, update in entries]))
                for (weight, _), direction in zip(entries, directions, strict=True):
                    rows, columns = weight.shape
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    step = direction.T if rows > columns else direction
                    weight.add_(step, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)
