"""The trained weights as others read them: Hugging Face names, adapters merged, one safetensors file.

The invariant: what is written is what the engine computes with, and a tied output layer is written once, as the embedding.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lightning.engines.export import original_names, write_file, write_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lightning.engines.torch.model import CausalLM

_ADAPTER = "default"


def write_weights(lm: CausalLM, file: Path) -> Path:
    """Write the current full weights atomically."""
    return write_file(full_weights(lm), file)


def write_model(lm: CausalLM, folder: Path) -> Path:
    """Write a model folder with the current full weights."""
    return write_folder(lm.folder, full_weights(lm), str(lm.dtype).removeprefix("torch."), folder)


def full_weights(lm: CausalLM) -> dict[str, torch.Tensor]:
    """Every weight under its Hugging Face name, on the CPU, in the engine's dtype."""
    deltas = _lora_deltas(lm.model)
    weights: dict[str, torch.Tensor] = {}
    written: set[int] = set()
    for name, tensor in lm.model.state_dict().items():
        if ".lora_" in name:
            continue
        key = name.replace(".base_layer.", ".")
        if key in deltas:
            tensor = tensor.to(deltas[key].dtype) + deltas[key]
        elif tensor.data_ptr() in written:
            continue
        written.add(tensor.data_ptr())
        weights[key] = tensor.to(lm.dtype) if tensor.is_floating_point() else tensor
    weights = original_names(lm.model, weights)
    return {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}


def _lora_deltas(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What each adapter adds to a weight, by the weight's name."""
    with torch.no_grad():
        return {
            f"{name}.weight": module.get_delta_weight(_ADAPTER)
            for name, module in model.named_modules()
            if _ADAPTER in getattr(module, "lora_A", {})
        }
