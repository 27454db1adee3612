"""The trained weights as others read them: Hugging Face names, adapters merged, one safetensors file.

The invariant: what is written is what the engine computes with, and a tied output layer is written once, as the embedding.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from lightning.engines.files import whole_file, whole_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lightning.engines.torch.model import CausalLM

WEIGHTS = "model.safetensors"
_ADAPTER = "default"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".index.json")


def write_weights(lm: CausalLM, file: Path) -> Path:
    """Write the current full weights atomically."""
    with whole_file(file) as path:
        save_file(full_weights(lm), path, metadata={"format": "pt"})
    return file


def write_model(lm: CausalLM, folder: Path) -> Path:
    """Write a model folder: the configuration, tokenizer and other small files it was loaded with, and current weights."""
    with whole_folder(folder) as path:
        for file in sorted(lm.folder.iterdir()):
            if file.is_file() and not file.name.startswith(".") and not file.name.endswith(_WEIGHT_SUFFIXES):
                shutil.copyfile(file, path / file.name)
        config = json.loads((path / "config.json").read_text())
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(lm.dtype).removeprefix("torch.")
        (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file(full_weights(lm), path / WEIGHTS, metadata={"format": "pt"})
    return folder


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
    weights = _original_names(lm.model, weights)
    return {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}


def _lora_deltas(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What each adapter adds to a weight, by the weight's name."""
    with torch.no_grad():
        return {
            f"{name}.weight": module.get_delta_weight(_ADAPTER)
            for name, module in model.named_modules()
            if _ADAPTER in getattr(module, "lora_A", {})
        }


def _original_names(model: PreTrainedModel, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers 5 fuses some families' weights when it loads them; files keep the original layout."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4 loads weights under the names of the file
        return weights
    reverted: dict[str, torch.Tensor] = revert_weight_conversion(model, weights)
    return reverted
