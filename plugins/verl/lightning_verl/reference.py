"""The reference model of a sharded one: its weights, kept on the CPU, take the trained ones' places for a pass.

The invariant: outside `in_place` the module holds the trained weights, bit for bit, also after an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor


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
