"""LoRA adapters (arXiv 2106.09685) on a model, by peft; also on a model without values, on the device `meta`.

The invariant: an export merges each adapter into a matrix of its own, so vLLM serves what is trained; and each name in
`engine.lora.target_modules` has an adapter. A layer where this is impossible is refused by name.
"""

from __future__ import annotations

import difflib
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning.errors import EngineError, MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    from lightning.config import LoraConfig

ADAPTER, WRAPPER = "default", "base_model.model."
"""The name that peft gives to an adapter, and its prefix of the names in a model that it wraps."""


def add_adapters(model: PreTrainedModel, lora: LoraConfig) -> None:
    """Put adapters in float32 on the layers that `lora` names. Raises `EngineError` if they do not fit the model."""
    try:
        import peft
    except ImportError as error:
        raise MissingExtraError("torch", "peft") from error
    targets = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    if not isinstance(targets, str):
        _refuse_unknown(model, targets)
    made = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, task_type="CAUSAL_LM")
    try:
        with warnings.catch_warnings():
            # peft warns of layers that are refused below, by name.
            warnings.filterwarnings(
                "ignore", "Model (with|has) `tie_word_embeddings=True`|LoRA adapter added to ConvNd"
            )
            peft.inject_adapter_in_model(made, model)
    except ValueError as error:
        raise EngineError(f"engine.lora does not fit this model: {error}") from error
    _refuse_unplaced(model)
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype is torch.bfloat16:
            parameter.data = parameter.data.float()


def _refuse_unknown(model: PreTrainedModel, targets: list[str]) -> None:
    """Raise `EngineError` naming the first target that is no module of the model, with the most similar name."""
    names = [name for name, _ in model.named_modules() if name]
    for target in targets:
        if any(name == target or name.endswith(f".{target}") for name in names):
            continue
        known = sorted({name.rpartition(".")[2] for name, module in model.named_modules() if hasattr(module, "weight")})
        near = difflib.get_close_matches(target, known, 1)
        cure = f"did you mean {near[0]!r}?" if near else f"name modules such as {', '.join(map(repr, known[:6]))}"
        raise EngineError(
            f"engine.lora does not fit this model: target_modules has {target!r}, and no module has that name: {cure}"
        )


def _refuse_unplaced(model: PreTrainedModel) -> None:
    """Raise `EngineError` naming the first layer whose adapter cannot be merged into the weights that are served."""
    found = next(iter(_unplaced(model).items()), None)
    if found is not None:
        name, why = found
        raise EngineError(
            f"engine.lora does not fit this model: {name} {why}, so an adapter there cannot be merged into the weights "
            "that are served. Leave the layer out of engine.lora.target_modules, as "
            'engine.lora.target_modules = ["q_proj", "k_proj", "v_proj", "o_proj"] does; or train all weights, without '
            "engine.lora"
        )


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers that have an adapter, by the names of their matrices."""
    return {
        f"{name.removeprefix(WRAPPER)}.weight": layer
        for name, layer in model.named_modules()
        if ADAPTER in getattr(layer, "lora_A", {}) or ADAPTER in getattr(layer, "lora_embedding_A", {})
    }


def factors(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an adapter's A (rank, in) and B (out, rank). For a table of embeddings the input counts as a one-hot vector."""
    if ADAPTER in layer.lora_A:
        return layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    return layer.lora_embedding_A[ADAPTER], layer.lora_embedding_B[ADAPTER]


def is_transposed(layer: Any) -> bool:
    """Whether a layer stores its matrix as (in, out), as tables of embeddings and GPT-2's layers do."""
    return bool(getattr(layer, "fan_in_fan_out", False)) or ADAPTER not in layer.lora_A


def _unplaced(model: nn.Module) -> dict[str, str]:
    """Return the trained layers and parameters that have no place of their own in an export: by name, the reason."""
    tensors = model.state_dict(keep_vars=True)
    found, placed = {}, {id(tensor) for name, tensor in tensors.items() if ".lora_" not in name}
    names = {name.removeprefix(WRAPPER).replace(".base_layer.", "."): name for name in tensors}
    for key, layer in adapted_layers(model).items():
        name, base = key.removesuffix(".weight"), tensors.get(names.get(key, ""))
        down, up = factors(layer)
        shape = (up.shape[0], down.shape[1]) if down.ndim == up.ndim == 2 else ()
        if base is None:
            found[name] = "keeps several matrices in one parameter"
        elif tuple(base.shape) != (shape[::-1] if is_transposed(layer) else shape):
            found[name] = "is no plain matrix"
        elif other := next((one for one, at in names.items() if tensors[at] is base and one != key), ""):
            found[name] = f"has the same weight as {other.removesuffix('.weight')} (tied)"
        else:
            placed |= {id(down), id(up)}
    for name, parameter in model.named_parameters():
        if (
            parameter.requires_grad
            and id(parameter) not in placed
            and not any(name.startswith(f"{one}.") for one in found)
        ):
            found[name] = "is no part of the exported weights"
    return found


def delta_of(layer: Any, whole: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return the matrix that an adapter adds to its layer's weight: alpha / rank times B A, in the weight's orientation.
    `whole` gathers a sharded factor."""
    down, up = (whole(factor.detach()) for factor in factors(layer))
    delta = (up @ down) * float(layer.scaling[ADAPTER])
    return delta.T if is_transposed(layer) else delta
