"""Whole weights from shards, under Hugging Face names.

The invariant: what is returned is what the ranks compute with, adapters merged in the precision they are trained in; a tied
output layer comes once, as the embedding.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning.engines.export import original_names

_ADAPTER = "default"
_WRAPPER = "base_model.model."


def whole_weights(engine: Any, dtype: torch.dtype, *, wanted: bool) -> dict[str, torch.Tensor]:
    """Every weight on the CPU, in `dtype`. All ranks must call it; those where it is not `wanted` keep nothing."""
    module: nn.Module = engine.module
    adapted = _adapted(module)
    found: dict[str, torch.Tensor] = {}
    written: set[int] = set()
    for name, tensor in module.state_dict().items():
        if ".lora_" in name:
            continue
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        key = name.removeprefix(_WRAPPER).replace(".base_layer.", ".")
        if local.data_ptr() in written and local.numel():
            continue
        written.add(local.data_ptr())
        whole = _whole(tensor)
        if key in adapted:
            whole = whole.float() + _delta(adapted[key])
        if wanted:
            found[key] = _on_cpu(whole, dtype)
    # peft wraps what transformers loaded.
    base: Any = cast("Any", module).get_base_model() if hasattr(module, "get_base_model") else module
    return original_names(base, found) if wanted else {}


def _adapted(module: nn.Module) -> dict[str, Any]:
    """The layers that have an adapter, by their weights' names."""
    return {
        f"{name.removeprefix(_WRAPPER)}.weight": layer
        for name, layer in module.named_modules()
        if _ADAPTER in getattr(layer, "lora_A", {})
    }


def _delta(layer: Any) -> torch.Tensor:
    """What an adapter adds to its weight: alpha / rank times B A (arXiv 2106.09685)."""
    down, up = (_whole(part[_ADAPTER].weight).float() for part in (layer.lora_A, layer.lora_B))
    return (up @ down) * float(layer.scaling[_ADAPTER])


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _on_cpu(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    tensor = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return tensor.detach().cpu().clone().contiguous()
