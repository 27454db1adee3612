"""Export of a model: as a folder that `transformers` and vLLM load, or as one file with all weights or adapters.

The invariant: the exported weights are those that the engine computes with, adapters merged, as safetensors under the names of
the folder that the model was loaded from; a tied output layer is written once, as the embedding. All else is copied from that
folder.
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
"""The folder into which a tokenizer's `save_pretrained` writes named chat templates, such as the one for tools."""
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".index.json")


def write_file(source: Path, weights: Mapping[str, torch.Tensor], dtype: torch.dtype, file: Path) -> Path:
    """Write the trained weights of a model from the folder `source` as one safetensors file, atomically, in `dtype`. The file's
    metadata lists the folder's tensors that it leaves out."""
    found = as_stored(source, weights, dtype)
    left = sorted(folder_tensors(source).keys() - found.keys())
    metadata = {"format": "pt"} | ({LEFT_OUT: json.dumps(left)} if left else {})
    with whole_file(file) as path:
        save_file(found, path, metadata=metadata)
    return file


def write_adapters(source: Path, model: nn.Module, dtype: torch.dtype, file: Path) -> Path | None:
    """Write a model's adapters alone as one safetensors file, atomically: A (rank, in) and B (out, rank) under the names of the
    matrices in `source` that they change. The metadata holds what is needed to merge them (base folder, dtypes, scaling).

    Returns the file. Returns None, and writes nothing, if `source` has such a matrix under another name, transposed, fused with
    others or in FP8.
    """
    stored, kept = folder_tensors(source), ""
    tensors: dict[str, torch.Tensor] = {}
    scaling: dict[str, float] = {}
    for name, layer in adapted_layers(model).items():
        down, up = (factor.detach() for factor in factors(layer))
        spec, base = stored.get(name), layer.get_base_layer().weight
        shape = (up.shape[0], down.shape[1])
        if is_transposed(layer) or spec is None or spec.dtype not in CASTABLE:
            return None  # the shape would not show a transposed square matrix
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
    """Write a model folder, atomically: a copy of `source` with these weights, in `dtype`, in the place of its own.

    Other tensors and files of `source` are copied unchanged; of its subfolders only that of chat templates is. In `config.json`
    only the dtype is changed, if it differs.
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
    """Set the dtype of the weights in a `config.json`, also in its `text_config` if that has one. A file that already names
    this dtype is not written."""
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
    """Return every weight of the text model on the CPU, matrices in `dtype`, in an order that all ranks share. A returned
    tensor may be the model's own, which the next step changes.

    `whole` gathers a sharded tensor; then all ranks must call this function, and ranks with `wanted` false get an empty dict.
    Adapters (arXiv 2106.09685) are merged layer by layer, so that there is never a second model in memory.
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
            # Vectors are small, and the folder may store some of them wider: `as_stored` decides their dtype.
            narrow = value.is_floating_point() and value.ndim > 1
            found[key] = (value.to(dtype) if narrow else value).cpu().contiguous()
    return original_names(unwrapped(model), found) if wanted else {}
