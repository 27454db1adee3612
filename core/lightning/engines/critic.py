"""The critic: one linear layer on the model's hidden states that says what a state is worth; and what every engine refuses
about it.

The invariant: before its first step every state is worth 0, and the policy's export knows nothing of it. No state's value is
asked of, learned by, or restored into an engine that has no critic of that kind.

V(s) = mean_j(w_j h_j) + b, with h the hidden state after the last norm at the prompt's last token. The mean (not the sum)
makes the learning rate mean the same in every model: one step of Adam moves a value by about its learning rate times the
size of a hidden unit, whether there are 64 of them or 4,096. On targets that are linear in the hidden states of the demos'
models, 40 steps of 128 states explained 0.17 of the variance at a rate of 0.01, half at 0.03 and 0.84 at 0.1; the default
lies between the last two.

With `trunk="frozen"` the value loss trains this layer alone. That is the default: the hidden states of a language model hold
what the next tokens will be, so a linear reading of them is a usable baseline; and the policy's gradient, its clipping and
its weights are then, to the last bit, those of a run whose advantages came from elsewhere, whatever scale the rewards have.
With `"shared"` it also trains the model, which can fit values better and makes `value_weight` a matter of balance.
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
"""Whether the critic's loss trains the model under it too, or its own layer only."""


def no_critic() -> EngineError:
    """For values that are asked of an engine without one."""
    return EngineError(
        "the engine has no critic: open it with critic=True, as the trainer does for an algorithm with `critic = True`"
    )


def refuse_targets(samples: Sequence[Sample]) -> None:
    """For an engine without a critic: raises `EngineError` when rows say what states should have been worth."""
    if any(span.value_weight for sample in samples for span in sample.spans):
        raise EngineError(
            "the rows say what states should have been worth, but the engine has no critic to learn it: open it with "
            "critic=True, or give the algorithm the attribute `critic = True`"
        )


def same_critic(folder: Path, saved: str, opened: str) -> None:
    """Raises `EngineError` when a training state was saved with another kind of critic than the engine was opened with.
    Kinds are those of `Trunk`; an empty one is no critic."""
    if saved != opened:
        raise EngineError(
            f"the training state in {folder} was saved {_with(saved)}, but this engine was opened {_with(opened)}: "
            "resume with the algorithm and the engine.critic_trunk that the run was started with"
        )


def _with(critic: str) -> str:
    return f"with a critic on a {critic} trunk" if critic else "without a critic"


PREFIX = "critic."
"""What the names of the critic's parameters begin with in a training state."""


class ValueHead:
    """A value head for a model that computes in `dtype`, on a device: in float32, or in float64 where the model is."""

    def __init__(
        self, model: PreTrainedModel, trunk: Trunk, *, dtype: torch.dtype, device: torch.device | str | int
    ) -> None:
        self.trunk = trunk
        kind = torch.float64 if dtype is torch.float64 else torch.float32
        size = int(model.get_output_embeddings().weight.shape[1])
        self._weight = nn.Parameter(torch.zeros(size, dtype=kind, device=device))
        self._bias = nn.Parameter(torch.zeros((), dtype=kind, device=device))

    def parameters(self) -> dict[str, nn.Parameter]:
        """What it learns, by the names in a training state."""
        return {f"{PREFIX}weight": self._weight, f"{PREFIX}bias": self._bias}

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """(M, H) hidden states to (M,) values."""
        states = hidden.detach() if self.trunk == "frozen" else hidden
        # Not a matrix product: autocast would make it bfloat16.
        return (states.to(self._weight.dtype) * self._weight).mean(-1) + self._bias
