"""The critic, a linear layer that computes a state's value from the model's hidden state; and the checks of it that all engines
share.

The invariant: before the critic's first step every state has the value 0, and an export of the policy does not contain the
critic. An engine without a critic, or with a critic of another kind, refuses to give, learn or restore values.

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

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from lightning.batch.sample import Sample
from lightning.errors import EngineError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


Trunk = Literal["shared", "frozen"]
"""Whether the critic's loss also trains the model under it (`shared`), or the critic's own layer only (`frozen`)."""


def no_critic() -> EngineError:
    """Return the error for a call that asks an engine without a critic for values."""
    return EngineError(
        "the engine has no critic: open it with critic=True, as the trainer does for an algorithm with `critic = True`"
    )


def refuse_targets(samples: Sequence[Sample]) -> None:
    """Raise `EngineError`, in an engine without a critic, if rows hold value targets."""
    if any(span.value_weight for sample in samples for span in sample.spans):
        raise EngineError(
            "the rows hold value targets, but the engine has no critic to learn them: open it with critic=True, or give the "
            "algorithm the attribute `critic = True`"
        )


def same_critic(folder: Path, saved: str, opened: str) -> None:
    """Raise `EngineError` if a training state in `folder` was saved with another kind of critic than the engine was opened
    with. `saved` and `opened` are a `Trunk`, or empty for no critic."""
    if saved != opened:
        raise EngineError(
            f"the training state in {folder} was saved {_with(saved)}, but this engine was opened {_with(opened)}: "
            "resume with the algorithm and the engine.critic_trunk that the run was started with"
        )


def _with(critic: str) -> str:
    return f"with a critic on a {critic} trunk" if critic else "without a critic"


PREFIX = "critic."
"""The prefix of the names of the critic's parameters in a training state."""


class ValueHead:
    """The critic's layer for a model that computes in `dtype`. The layer is in float32, or in float64 if the model is."""

    def __init__(
        self, model: PreTrainedModel, trunk: Trunk, *, dtype: torch.dtype, device: torch.device | str | int
    ) -> None:
        self.trunk = trunk
        kind = torch.float64 if dtype is torch.float64 else torch.float32
        size = int(model.get_output_embeddings().weight.shape[1])
        self._weight = nn.Parameter(torch.zeros(size, dtype=kind, device=device))
        self._bias = nn.Parameter(torch.zeros((), dtype=kind, device=device))

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the critic's parameters by their names in a training state."""
        return {f"{PREFIX}weight": self._weight, f"{PREFIX}bias": self._bias}

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the values (M,) of hidden states (M, H)."""
        states = hidden.detach() if self.trunk == "frozen" else hidden
        # Not a matrix product: autocast would make it bfloat16.
        return (states.to(self._weight.dtype) * self._weight).mean(-1) + self._bias
