"""What a worker asks of verl's engine beside verl's own interface; `fsdp.py` and `megatron.py` have it.

The invariant: of a rank's part of the model nothing else is known outside of the module that says how it was cut.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from lightning_verl.reference import ReferenceWeights

if TYPE_CHECKING:
    from lightning_verl.critic import Learner


class Strategy(Protocol):
    """How a model is cut into the parts that ranks hold. All ranks call the same methods."""

    def begin(self) -> None:
        """Make the model what our losses expect, when it has been loaded: no dropout, and a softmax in float32."""

    @property
    def trained(self) -> nn.Module:
        """This rank's part of the model."""

    def first_weights(self, *, moved: bool) -> ReferenceWeights:
        """The weights of the model's folder; where the present ones have not `moved` they are those."""

    def whole_weights(self, dtype: torch.dtype, *, wanted: bool) -> dict[str, torch.Tensor]:
        """All weights under their Hugging Face names, on the CPU; none on ranks where they are not `wanted`."""

    def save(self, critic: Learner | None, folder: Path, steps: int) -> None:
        """Write this rank's part of the training state, after so many steps of the policy."""

    def load(self, critic: Learner | None, folder: Path, steps: int, critic_steps: int) -> None:
        """Read what `save` wrote, after so many steps of each."""

    def end(self) -> None:
        """Leave this process as it was before; it may begin another model."""
