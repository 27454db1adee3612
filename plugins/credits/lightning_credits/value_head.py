"""The critic, a linear layer that computes a state's value from the model's hidden state.

The invariant: before the critic's first step every state has the value 0.

V(s) = mean_j(w_j h_j) + b, with h the hidden state after the last norm at the prompt's last token. The mean (not the sum) gives
the learning rate the same meaning in every model: one step of Adam moves a value by about its learning rate times the size of
a hidden unit, whether there are 64 of them or 4,096. On targets that are linear in the hidden states of the demos' models, 40
steps of 128 states explained 0.17 of the variance at a rate of 0.01, half at 0.03 and 0.84 at 0.1; the default lies between the
last two.

With `trunk="frozen"`, the default, the value loss trains this layer alone. A language model's hidden states predict the next
tokens, so a linear function of them is a usable baseline. The policy's gradient, clipping and weights then depend on the critic
only through the advantages, bit for bit and whatever scale the rewards have. With `"shared"` the value loss also trains the
model, which can fit values better, but then `value_weight` balances the two losses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from lightning.losses.protocol import LossOutput
from torch import nn

from lightning_credits.config import CriticConfig

if TYPE_CHECKING:
    from lightning.config import Config
    from transformers import PreTrainedModel

ROUNDING = float(torch.finfo(torch.float32).eps) ** 2
"""Relative to their mean square, the variance of numbers that differ only by the rounding of float32."""

Trunk = Literal["shared", "frozen"]
"""Whether the critic's loss also trains the model under it (`shared`), or the critic's own layer only (`frozen`)."""


@dataclass(frozen=True, slots=True)
class CriticHead:
    """The head `critic` of an engine (`lightning.engines.protocol.Head`)."""

    trunk: Trunk = "frozen"
    lr: float = 0.05

    name: ClassVar[str] = "critic"

    def __str__(self) -> str:
        return f"{self.name} on a {self.trunk} trunk"

    @property
    def trains_model(self) -> bool:
        """Whether the critic's loss also trains the model."""
        return self.trunk == "shared"

    def module(self, model: PreTrainedModel, *, dtype: torch.dtype, device: torch.device | str | int) -> ValueHead:
        """Return a new critic for a model that computes in `dtype`."""
        return ValueHead(model, self.trunk, dtype=dtype, device=device)

    def loss(
        self, values: torch.Tensor, targets: npt.NDArray[np.floating], weights: npt.NDArray[np.floating]
    ) -> LossOutput:
        """Return sum_i w_i * (V_i - target_i)^2 / 2 over M states, L^VF of PPO (arXiv 1707.06347, section 5). All have
        shape (M,).

        V is not clipped to its old value, because that did not help in measurements (arXiv 2006.05990, section 3.2). The sums
        are weighted. They are computed in float64, since a variance is a small difference of two of them, which float32 would
        lose if targets are nearly equal; and on the CPU, since some devices have no float64.
        """
        goals, shares = (torch.as_tensor(part).to(values.device, values.dtype) for part in (targets, weights))
        loss = (shares * (values - goals).square()).sum() / 2
        value, target, weight = (part.detach().to("cpu", torch.float64) for part in (values, goals, shares))
        error = target - value
        powers = {
            "weight": torch.ones_like(weight),
            "value": value,
            "target": target,
            "target_squared": target.square(),
            "error": error,
            "error_squared": error.square(),
        }
        return LossOutput(loss, {name: float((weight * power).sum()) for name, power in powers.items()})

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return a step's metrics of the critic from the added-up `metrics` of `loss`; empty if the step has no states.

        They are `value_loss` (mean squared error / 2), `value_mean`, `value_target` (the targets' mean) and
        `value_explained_variance`: 1 - Var(target - V) / Var(target), which is 1 for a perfect critic and 0 for a constant
        one, and 0 if all targets are equal up to the rounding of float32."""
        weight = sums.get("weight", 0.0)
        if not weight:
            return {}
        mean = {name: value / weight for name, value in sums.items()}
        spread = mean["target_squared"] - mean["target"] ** 2
        unexplained = max(0.0, mean["error_squared"] - mean["error"] ** 2)
        return {
            "value_loss": mean["error_squared"] / 2,
            "value_mean": mean["value"],
            "value_target": mean["target"],
            "value_explained_variance": 1.0 - unexplained / spread
            if spread > ROUNDING * mean["target_squared"]
            else 0.0,
        }


def critic_head(config: Config) -> CriticHead:
    """Return the critic by the section `engine` of the settings."""
    settings = CriticConfig.of(config)
    return CriticHead(settings.critic_trunk, settings.critic_lr)


class ValueHead(nn.Module):
    """The critic's layer for a model that computes in `dtype`. The layer is in float32, or in float64 if the model is."""

    def __init__(
        self, model: PreTrainedModel, trunk: Trunk, *, dtype: torch.dtype, device: torch.device | str | int
    ) -> None:
        super().__init__()
        self.trunk = trunk
        kind = torch.float64 if dtype is torch.float64 else torch.float32
        size = int(model.get_output_embeddings().weight.shape[1])
        self.weight = nn.Parameter(torch.zeros(size, dtype=kind, device=device))
        self.bias = nn.Parameter(torch.zeros((), dtype=kind, device=device))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the values (M,) of hidden states (M, H)."""
        states = hidden.detach() if self.trunk == "frozen" else hidden
        # Not a matrix product: autocast would make it bfloat16.
        return (states.to(self.weight.dtype) * self.weight).mean(-1) + self.bias
