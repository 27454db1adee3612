"""Model folders, read by `transformers`, and what is trained of the model.

The invariant: weights that a folder does not hold whole are refused by name; left to itself, `transformers` makes them up. No
noise is active, whatever the model's configuration says of it.

Rotary positions that `transformers` computes by the longest row it has seen, and vLLM by its `max_model_len`, have one
rotation in every row, and that is vLLM's, which chooses once. longrope (arXiv 2402.13753) has long factors for every position
as soon as `max_model_len` exceeds the length before scaling, else short ones; dynamic scaling ends with the length before
scaling. An own vLLM whose length is not set is started with that length.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning.errors import EngineError
from lightning.policy_server.model_facts import growing_positions
from lightning.policy_server.profiles import argument

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lightning.config.sections import PolicyServerConfig

_NOISE = re.compile("drop|jitter|noise")
"""What the names of probabilities and widths of noise have in common."""


def gradient_mode(model: nn.Module) -> None:
    """The mode that gradients are computed in: that of evaluation, without noise of any name. Only layers that compute their
    activations a second time are in training mode, since they do so in no other; their own noise is set to 0."""
    model.eval()
    layers = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    inner = [layer for layer in layers if not hasattr(layer, "gradient_checkpointing_enable")]
    for layer in inner or layers:  # older code asks the whole trunk for its mode
        layer.training = True
        for owner in (layer, getattr(layer, "config", None)):
            for name, value in list(getattr(owner, "__dict__", {}).items()):
                if isinstance(value, float) and _NOISE.search(name):
                    setattr(owner, name, 0.0)


def read_model(folder: Path, kind: Any = None, **how: Any) -> PreTrainedModel:
    """The model of a folder, by an auto class of `transformers` (`AutoModelForCausalLM` if it is not told), whose
    `from_pretrained` is told `how`; on the device `meta` only names and shapes of tensors are read.

    Raises `EngineError` naming the folder and what is wrong: it is none, it cannot be read, or it lacks tensors.
    """
    from transformers import AutoModelForCausalLM

    check_config(folder)
    fp8 = quantisation(folder) == "fp8"
    if fp8:
        from transformers import FineGrainedFP8Config

        how["quantization_config"] = FineGrainedFP8Config(dequantize=True)  # FP8 has no gradient
    try:
        with _quietly(), _comparing() if how.get("device_map") == "meta" else nullcontext():
            model, report = (kind or AutoModelForCausalLM).from_pretrained(
                folder, local_files_only=True, output_loading_info=True, **how
            )
    except Exception as error:
        raise EngineError(f"cannot load a causal language model from {folder}: {error}") from error
    broken = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if broken:
        raise EngineError(
            f"the weights in {folder} do not fit its config.json: {len(broken)} tensors are missing or have another shape, "
            f"for example {broken[0]}. Copy the model again"
        )
    found: PreTrainedModel = model
    if fp8:
        _keep_layout(found)
    return found


def check_config(folder: Path) -> None:
    """Raise `EngineError` for what is no model folder at all."""
    if not (folder / "config.json").is_file():
        raise EngineError(
            f"{folder} is not a model folder: it has no config.json. Give a folder that transformers can load"
        )


def _keep_layout(model: Any) -> None:
    """Let transformers undo its renaming and fusing when weights are written, and not its reading of FP8: it would also put
    what was never FP8 into blocks. `as_stored` knows the folder's."""
    from transformers.core_model_loading import WeightConverter

    kept = []
    for rule in model._weight_conversions or ():  # noqa: SLF001 — where transformers notes how it read a folder
        operations = getattr(rule, "operations", [])
        others = [operation for operation in operations if type(operation).__name__ != "Fp8Dequantize"]
        if len(others) == len(operations):
            kept.append(rule)
        elif others:
            sources = [name.removesuffix("$") for name in rule._original_source_patterns if "_scale" not in name]  # noqa: SLF001
            kept.append(WeightConverter(sources, list(rule._original_target_patterns), others))  # noqa: SLF001 — as above
    model._weight_conversions = kept  # noqa: SLF001 — as above


@contextmanager
def _comparing() -> Iterator[None]:
    """Tensors without values are equal if their shapes are: transformers compares an output layer with its embedding where a
    folder stores both, to see whether they are tied as its configuration says."""

    class Equal(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.equal and args[0].is_meta:
                return args[0].shape == args[1].shape
            return func(*args, **(kwargs or {}))

    with Equal():
        yield


@contextmanager
def _quietly() -> Iterator[None]:
    """Without progress bars, and without a table of all tensors that the model does not need: `Engine.check` says it."""
    from transformers.utils import logging

    enabled, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if enabled:
            logging.enable_progress_bar()


def beside_text(model: nn.Module) -> set[int]:
    """The tensors of a model, by `id`, that text does not need, such as those of a vision tower: they are not trained."""
    base = unwrapped(model)
    if base.config.get_text_config() is base.config:
        return set()
    text = [base.get_decoder(), base.get_output_embeddings()]
    needed = {id(tensor) for part in text for tensor in part.state_dict(keep_vars=True).values()}
    return {id(tensor) for tensor in model.state_dict(keep_vars=True).values()} - needed


def unwrapped(model: nn.Module) -> PreTrainedModel:
    """What transformers loaded, and peft may have wrapped."""
    base: Any = cast("Any", model).get_base_model() if hasattr(model, "get_base_model") else model
    return cast("PreTrainedModel", base)


def original_names(model: PreTrainedModel, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers 5 fuses some families' weights when it loads them; files keep the original layout."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4 loads weights under the names of the file
        return weights
    reverted: dict[str, torch.Tensor] = revert_weight_conversion(model, weights)
    return reverted


def names_and_shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """What `whole_weights` gives of a model on the device `meta`, which has no values."""
    beside, seen = beside_text(model), set[int]()
    found: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in beside and id(tensor) not in seen:
            found[name] = tensor.detach()
        seen.add(id(tensor))
    return {name: tuple(tensor.shape) for name, tensor in original_names(model, found).items()}


def quantisation(folder: Path) -> str:
    """The method that a folder's weights are quantised by, such as `fp8` or `gptq`; empty where they are not."""
    config = json.loads((folder / "config.json").read_bytes())
    text = config.get("text_config") or {}
    for place in (config, text):
        found = place.get("quantization_config") or place.get("compression_config")
        if found:
            method = str(found.get("quant_method", "unknown"))
            return method if method != "fp8" or found.get("weight_block_size") else "fp8 without blocks"
    return ""


UNKNOWN = 0
"""The `max_model_len` of a server that somebody else has started."""


def served_length(config: PolicyServerConfig) -> int | None:
    """The `max_model_len` of the server: None where an own one is to choose it, `UNKNOWN` where somebody else has chosen."""
    given = argument(config.args, "--max-model-len")
    if given:
        return int(given) if given.isdigit() else UNKNOWN
    return config.max_model_len or (UNKNOWN if config.attach else None)


def fix_positions(model: nn.Module, folder: Path, max_model_len: int | None) -> int | None:
    """Fix a model's frequencies as a vLLM of this `max_model_len` does (None: an own one whose length is not set); returns how
    many positions are served, None where nobody knows. Raises `EngineError` naming the setting where vLLM cannot be
    followed."""
    found = growing_positions(folder)
    if found is None:
        return max_model_len or None
    scaled = f"{folder} scales the positions behind {found.length:,} tokens ({found.kind})"
    if max_model_len == UNKNOWN:
        raise EngineError(
            f"{scaled}, which vLLM does by its max_model_len: set policy_server.max_model_len to that of the attached vLLM"
        )
    if max_model_len is None or max_model_len <= found.length:
        return found.length if max_model_len is None else max_model_len
    if found.kind == "dynamic":
        raise EngineError(
            f"{scaled}, by each row's own length, which vLLM does not: set policy_server.max_model_len to "
            f"{found.length} or less"
        )
    for module in unwrapped(model).modules():
        _take_long(module, found.length)
    return max_model_len


def _take_long(module: Any, length: int) -> None:
    """Give a rotary module its frequencies behind this length for every position; nothing happens to other modules."""
    kinds: dict[str | None, str] | str | None = getattr(module, "rope_type", None)
    for layer, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
        if kind != "longrope":
            continue
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        prefix, which = (f"{layer}_", {"layer_type": layer}) if layer else ("", {})
        buffer = getattr(module, f"{prefix}inv_freq")
        long, _ = ROPE_INIT_FUNCTIONS[kind](module.config, buffer.device, seq_len=length + 1, **which)
        module.register_buffer(f"{prefix}inv_freq", long, persistent=False)
        module.rope_type = kinds | {layer: "default"} if isinstance(kinds, dict) else "default"  # which never changes
        kinds = module.rope_type
