"""A model as others read it: a folder that `transformers` and vLLM load, or one file with all weights.

The invariant: weights are what the engine computes with, adapters merged, under the names of the folder that the model was
loaded from, a tied output layer once, as the embedding, in safetensors; all else is what that folder holds.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import save_file

from lightning.engines.adapters import ADAPTER, WRAPPER, adapted_layers, delta_of, factors, is_transposed
from lightning.engines.files import whole_file, whole_folder
from lightning.engines.loading import beside_text, original_names, unwrapped
from lightning.engines.model_contents import as_stored, tensors_of, tied_heads
from lightning.policy_server.model_folder import (
    ADAPTERS,
    CASTABLE,
    INDEX,
    LEFT_OUT,
    LORA_A,
    LORA_B,
    folder_tensors,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

WEIGHTS = "model.safetensors"
TEMPLATES = "additional_chat_templates"
"""Where `save_pretrained` of a tokenizer keeps chat templates that have a name, such as that for tools."""
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".index.json")


def write_file(source: Path, weights: Mapping[str, torch.Tensor], dtype: torch.dtype, file: Path) -> Path:
    """Write the weights that were trained of the folder `source` as one safetensors file, atomically, in `dtype`;
    the file says which of the folder's tensors it leaves out."""
    found = as_stored(source, weights, dtype)
    left = sorted(folder_tensors(source).keys() - found.keys())
    metadata = {"format": "pt"} | ({LEFT_OUT: json.dumps(left)} if left else {})
    with whole_file(file) as path:
        save_file(found, path, metadata=metadata)
    return file


def write_adapters(source: Path, model: nn.Module, dtype: torch.dtype, file: Path) -> Path | None:
    """Write a model's adapters alone as one safetensors file, atomically: A (rank, in) and B (out, rank) under the names of the
    matrices in `source` that they change, and what whoever merges them must know.

    None where `source` has such a matrix under another name, transposed, fused with others or in FP8.
    """
    stored, kept = folder_tensors(source), ""
    tensors: dict[str, torch.Tensor] = {}
    scaling: dict[str, float] = {}
    for name, layer in adapted_layers(model).items():
        down, up = (factor.detach() for factor in factors(layer))
        spec, base = stored.get(name), layer.get_base_layer().weight
        shape = (up.shape[0], down.shape[1])
        if is_transposed(layer) or spec is None or spec.dtype not in CASTABLE:
            return None  # one that is square has the same shape
        if spec.shape != shape or tuple(base.shape) != shape:
            return None
        tensors |= {name + LORA_A: down.cpu().contiguous(), name + LORA_B: up.cpu().contiguous()}
        scaling[name] = float(layer.scaling[ADAPTER])
        kept = str(base.dtype).removeprefix("torch.")
    told = {
        "base": str(source.resolve()),
        "base_dtype": kept,
        "dtype": str(dtype).removeprefix("torch."),
        "scaling": scaling,
    }
    with whole_file(file) as path:
        save_file(tensors, path, metadata={"format": "pt", ADAPTERS: json.dumps(told)})
    return file


def write_folder(source: Path, weights: Mapping[str, torch.Tensor], dtype: torch.dtype, folder: Path) -> Path:
    """Write a model folder, atomically: what `source` has, with these weights in the place of its own, in `dtype`.

    Its other tensors and files are carried over untouched, of its folders that of chat templates alone; `config.json` only gets
    the dtype, where that is another.
    """
    found, stored = as_stored(source, weights, dtype), folder_tensors(source)
    found |= {head: found[embedding].clone() for head, embedding in tied_heads(found, stored).items()}
    with whole_folder(folder) as path:
        for file in sorted(source.iterdir()):
            if file.is_file() and not file.name.startswith(".") and not file.name.endswith(_WEIGHT_SUFFIXES):
                shutil.copyfile(file, path / file.name)
        for template in (source / TEMPLATES).glob("*.jinja"):
            (path / TEMPLATES).mkdir(exist_ok=True)
            shutil.copyfile(template, path / TEMPLATES / template.name)
        _set_dtype(path / "config.json", str(dtype).removeprefix("torch."))
        parts = [found, dict(tensors_of(source, stored.keys() - found.keys()))]
        files = [WEIGHTS] if not parts[1] else [f"model-{part:05}-of-00002.safetensors" for part in (1, 2)]
        for name, tensors in zip(files, parts, strict=False):
            save_file(tensors, path / name, metadata={"format": "pt"})
        if len(files) > 1:
            places = {key: name for name, tensors in zip(files, parts, strict=True) for key in tensors}
            size = sum(tensor.nbytes for tensors in parts for tensor in tensors.values())
            index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
            (path / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return folder


def _set_dtype(file: Path, dtype: str) -> None:
    """Let a configuration name the dtype of the weights, wherever it names one; one that does already stays as it is."""
    config = json.loads(file.read_bytes())
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    places = [config, *(part for part in [config.get("text_config")] if isinstance(part, dict) and key in part)]
    if any(place.get(key) != dtype for place in places):
        for place in places:
            place[key] = dtype
        file.write_text(json.dumps(config, indent=2) + "\n")


def whole_weights(
    model: nn.Module,
    dtype: torch.dtype,
    whole: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    *,
    wanted: bool = True,
) -> dict[str, torch.Tensor]:
    """Every weight of the text model on the CPU, matrices in `dtype`, in an order that all ranks share. A tensor may be the
    model's own, which the next step changes.

    `whole` makes a tensor of a sharded one; then all ranks must call this, and those where it is not `wanted` keep nothing.
    Layers with an adapter (arXiv 2106.09685) are merged one after the other, so that no second model is ever in memory.
    """
    adapted = adapted_layers(model)
    found: dict[str, torch.Tensor] = {}
    written: set[int] = set()
    beside = beside_text(model)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if ".lora_" in name or id(tensor) in beside:
            continue
        key = name.removeprefix(WRAPPER).replace(".base_layer.", ".")
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if key not in adapted and local.numel() and local.data_ptr() in written:
            continue
        written.add(local.data_ptr())
        value = whole(tensor.detach())
        if key in adapted:
            delta = delta_of(adapted[key], whole)
            value = value.to(delta.dtype) + delta
        if wanted:
            # Vectors are small, and folders may store some of them wider: `as_stored` has the last word.
            narrow = value.is_floating_point() and value.ndim > 1
            found[key] = (value.to(dtype) if narrow else value).cpu().contiguous()
    return original_names(unwrapped(model), found) if wanted else {}
