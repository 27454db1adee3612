"""A model as others read it: a folder that `transformers` and vLLM load, or one file with all weights.

The invariant: weights have their Hugging Face names and lie in safetensors; all else is what the model was loaded with.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import save_file

from lightning.engines.files import whole_file, whole_folder

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

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


def original_names(model: PreTrainedModel, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers 5 fuses some families' weights when it loads them; files keep the original layout."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4 loads weights under the names of the file
        return weights
    reverted: dict[str, torch.Tensor] = revert_weight_conversion(model, weights)
    return reverted
