"""The reference model: the one that training began with, for losses that compare with it.

The invariant: it computes exactly as the trained model did before its first step, in the same dtype, also in a run that was
resumed: it comes from the folder that the engine was opened with, never from a training state.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lightning.engines.out_of_memory import needing_room
from lightning.engines.torch.model import CausalLM, load_model

logger = logging.getLogger(__name__)


class Reference:
    """The reference of a trained model. Under LoRA it is that model without its adapters and costs no memory; otherwise it
    is a second copy, which is loaded when it is first asked for."""

    def __init__(self, trained: CausalLM, *, lora: bool) -> None:
        self._trained, self._lora = trained, lora
        self._copy: CausalLM | None = None

    @contextmanager
    def model(self) -> Iterator[CausalLM]:
        """The reference, to compute with inside the block, without gradients."""
        if self._lora:
            with self._trained.without_adapters():
                yield self._trained
        else:
            yield self._loaded()

    def _loaded(self) -> CausalLM:
        if self._copy is None:
            folder, device = self._trained.folder, self._trained.device
            logger.info("loading the reference model from %s", folder)
            doing = "loading the reference model, which without adapters is a second copy beside the trained one"
            with needing_room(doing), torch.random.fork_rng([device] if device.type == "cuda" else []):
                self._copy = load_model(
                    folder,
                    dtype=str(self._trained.dtype).removeprefix("torch."),
                    device=device,
                    lora=None,
                    gradient_checkpointing=False,
                )
            self._copy.model.requires_grad_(False)
        return self._copy
