"""The critic's loss, as a pure function of the values of states.

The invariant: the result is a sum over states of `weights * something`, as every loss here, so splitting a step changes
nothing; and so are the numbers from which `value_metrics` tells how good the critic is.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lightning.losses.protocol import LossOutput


def value_loss(values: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> LossOutput:
    """sum_i w_i * (V_i - target_i)^2 / 2, all of shape (M,): L^VF of PPO (arXiv 1707.06347, section 5).

    Left out: clipping of V to its old value, which did not help where it was measured (arXiv 2006.05990, section 3.2).
    `metrics` are the weighted sums that `value_metrics` takes.
    """
    loss = (weights * (values - targets).square()).sum() / 2
    with torch.no_grad():
        errors = targets - values
        sums = torch.stack([
            weights.sum(),
            (weights * values).sum(),
            (weights * targets).sum(),
            (weights * targets.square()).sum(),
            (weights * errors).sum(),
            (weights * errors.square()).sum(),
        ])  # fmt: skip
    names = ("weight", "value", "target", "target_squared", "error", "error_squared")
    return LossOutput(loss, dict(zip(names, sums.tolist(), strict=True)))


def value_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """`value_loss` (mean squared error / 2), `value_mean`, `value_target` (the targets' mean) and
    `value_explained_variance`: 1 - Var(target - V) / Var(target), which is 1 for a perfect critic and 0 for a constant one;
    0 where all targets are equal. Takes the added-up `metrics` of all of a step's states; empty without any."""
    weight = sums.get("weight", 0.0)
    if not weight:
        return {}
    mean = {name: value / weight for name, value in sums.items()}
    spread = mean["target_squared"] - mean["target"] ** 2
    unexplained = mean["error_squared"] - mean["error"] ** 2
    return {
        "value_loss": mean["error_squared"] / 2,
        "value_mean": mean["value"],
        "value_target": mean["target"],
        "value_explained_variance": 1.0 - unexplained / spread if spread > 1e-12 * mean["target_squared"] else 0.0,
    }
