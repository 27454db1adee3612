"""A model as others read it: a folder that `transformers` and vLLM load, or one file with all weights.

The invariant: weights are what the engine computes with, adapters merged, under their Hugging Face names, a tied output layer
once, as the embedding, in safetensors; all else is what the model was loaded with.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from safetensors.torch import save_file

from lightning.engines.files import whole_file, whole_folder

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

_ADAPTER, _WRAPPER = "default", "base_model.model."
"""What peft calls an adapter, and what it puts before the names of a model that it wraps."""
WEIGHTS = "model.safetensors"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".index.json")


def write_file(weights: Mapping[str, torch.Tensor], file: Path) -> Path:
    """Write weights as one safetensors file, atomically."""
    with whole_file(file) as path:
        save_file(dict(weights), path, metadata={"format": "pt"})
    return file


def write_folder(source: Path, weights: Mapping[str, torch.Tensor], dtype: str, folder: Path) -> Path:
    """Write a model folder, atomically: the configuration, tokenizer and other small files of `source`, and these weights,
    which have the dtype (`float32`)."""
    with whole_folder(folder) as path:
        for file in sorted(source.iterdir()):
            if file.is_file() and not file.name.startswith(".") and not file.name.endswith(_WEIGHT_SUFFIXES):
                shutil.copyfile(file, path / file.name)
        config = json.loads((path / "config.json").read_text())
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
        (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file(dict(weights), path / WEIGHTS, metadata={"format": "pt"})
    return folder


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def whole_weights(
    model: nn.Module,
    dtype: torch.dtype,
    whole: Callable[[torch.Tensor], torch.Tensor] = _itself,
    *,
    wanted: bool = True,
) -> dict[str, torch.Tensor]:
    """Every weight on the CPU, in `dtype`, in an order that all ranks share.

    `whole` makes a tensor of a sharded one; then all ranks must call this, and those where it is not `wanted` keep nothing.
    Layers with an adapter (arXiv 2106.09685) are merged one after the other, so that no second model is ever in memory.
    """
    adapted = {
        f"{name.removeprefix(_WRAPPER)}.weight": layer
        for name, layer in model.named_modules()
        if _ADAPTER in getattr(layer, "lora_A", {})
    }
    found: dict[str, torch.Tensor] = {}
    written: set[int] = set()
    for name, tensor in model.state_dict().items():
        if ".lora_" in name:
            continue
        key = name.removeprefix(_WRAPPER).replace(".base_layer.", ".")
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if key not in adapted and local.numel() and local.data_ptr() in written:
            continue
        written.add(local.data_ptr())
        value = whole(tensor.detach())
        if key in adapted:
            delta = _delta(adapted[key], whole)
            value = value.to(delta.dtype) + delta
        if wanted:
            found[key] = (value.to(dtype) if value.is_floating_point() else value).cpu().clone().contiguous()
    return original_names(unwrapped(model), found) if wanted else {}


def unwrapped(model: nn.Module) -> PreTrainedModel:
    """What transformers loaded, and peft may have wrapped."""
    base: Any = cast("Any", model).get_base_model() if hasattr(model, "get_base_model") else model
    return cast("PreTrainedModel", base)


def _delta(layer: Any, whole: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """What an adapter adds to its weight: alpha / rank times B A."""
    down, up = (whole(part[_ADAPTER].weight.detach()) for part in (layer.lora_A, layer.lora_B))
    delta = (up @ down) * float(layer.scaling[_ADAPTER])
    return delta.T if layer.fan_in_fan_out else delta


def original_names(model: PreTrainedModel, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers 5 fuses some families' weights when it loads them; files keep the original layout."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4 loads weights under the names of the file
        return weights
    reverted: dict[str, torch.Tensor] = revert_weight_conversion(model, weights)
    return reverted
