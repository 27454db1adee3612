"""The interface of verl's engines beyond verl's own (implemented in `fsdp.py` and `megatron.py`); and the reference model of a
sharded model: its weights are kept on the CPU, and replace the trained ones during a pass.

The invariant: only the module that divides the model knows more about a rank's part of it. Outside `in_place` the module has
the trained weights, bit for bit, also after an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from lightning.config import LoraConfig

    from lightning_verl.head import Learner


@dataclass(frozen=True, slots=True)
class ReferenceWeights:
    """This rank's shards of the trained parameters (under LoRA: of the policy's adapters only) at the start of training."""

    shards: dict[str, torch.Tensor]

    @classmethod
    def of(cls, module: nn.Module) -> ReferenceWeights:
        """Copy the module's present weights to the CPU."""
        return cls({name: shard.detach().to("cpu", copy=True) for name, shard in _trained(module).items()})

    @contextmanager
    def in_place(self, module: nn.Module) -> Iterator[None]:
        """Make the module the reference model for the block."""
        present = ReferenceWeights.of(module)
        try:
            self.put(module)
            yield
        finally:
            present.put(module)

    def put(self, module: nn.Module) -> None:
        """Copy these weights into the module."""
        with torch.no_grad():
            for name, shard in _trained(module).items():
                shard.copy_(self.shards[name])


def _trained(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the local shards of the trained parameters by name; writing to a shard changes the parameter."""
    return {
        name: value.to_local() if isinstance(value, DTensor) else value.data
        for name, value in module.named_parameters()
        if value.requires_grad
    }


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whole; if it is sharded, all ranks must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Strategy(Protocol):
    """A way to divide a model into the parts that ranks hold. All ranks call the same methods."""

    beside: Sequence[tuple[LoraConfig, int]]
    """The adapters of all policies but the first, each with the seed of their first values; set before the model is loaded."""

    def choose(self, policy: int) -> None:
        """Compute with the policy of this number from now on, and train that one. Its optimizer and its present gradient are
        those that it had when it was left."""

    def begin(self, max_model_len: int | None) -> None:
        """Prepare a loaded model for our losses: no dropout, the positions of a vLLM with this maximum length, and softmax in
        float32. Raises `EngineError` for a model that cannot be prepared."""

    @property
    def trained(self) -> nn.Module:
        """This rank's part of the model."""

    def first_weights(self, *, moved: bool) -> ReferenceWeights:
        """Return the weights of the model's folder; the present ones where they have not `moved`."""

    def whole_weights(self, dtype: torch.dtype, *, wanted: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all weights under their Hugging Face names, on the CPU, as they are gathered; none on ranks where they are not
        `wanted`. All ranks must exhaust the iterator, also after an error."""

    def save(self, head: Learner | None, folder: Path, steps: int) -> None:
        """Write this rank's part of the training state, after this many steps of the policy."""

    def load(self, head: Learner | None, folder: Path, steps: int, head_steps: int) -> None:
        """Read what `save` wrote, after these many steps of the policy and of the head."""

    def end(self) -> None:
        """Restore the process as it was before; it may then begin another model."""
