"""What a worker asks of verl's engine beside verl's own interface (`fsdp.py` and `megatron.py` have it), and the reference
model of a sharded one: its weights, kept on the CPU, take the trained ones' places for a pass.

The invariant: of a rank's part of the model nothing else is known outside of the module that says how it was cut; and outside
`in_place` the module holds the trained weights, bit for bit, also after an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from lightning_verl.critic import Learner


@dataclass(frozen=True, slots=True)
class ReferenceWeights:
    """This rank's shards of the trained parameters (under LoRA: of the adapters only), as they were when training began."""

    shards: dict[str, torch.Tensor]

    @classmethod
    def of(cls, module: nn.Module) -> ReferenceWeights:
        """The present ones."""
        return cls({name: shard.detach().to("cpu", copy=True) for name, shard in _trained(module).items()})

    @contextmanager
    def in_place(self, module: nn.Module) -> Iterator[None]:
        """The module is the reference model inside the block."""
        present = ReferenceWeights.of(module)
        try:
            self.put(module)
            yield
        finally:
            present.put(module)

    def put(self, module: nn.Module) -> None:
        """Make these the module's weights."""
        with torch.no_grad():
            for name, shard in _trained(module).items():
                shard.copy_(self.shards[name])


def _trained(module: nn.Module) -> dict[str, torch.Tensor]:
    """Local shards of what is trained; writing to one changes the parameter."""
    return {
        name: value.to_local() if isinstance(value, DTensor) else value.data
        for name, value in module.named_parameters()
        if value.requires_grad
    }


class Strategy(Protocol):
    """How a model is cut into the parts that ranks hold. All ranks call the same methods."""

    def begin(self, max_model_len: int | None) -> None:
        """Make the model what our losses expect, when it has been loaded: no noise, positions as a vLLM of this length has
        them, and a softmax in float32. Raises `EngineError` for a model that cannot be so."""

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
