"""Loading of model folders by `transformers`, the preparation of a model for training, and LoRA adapters
(arXiv 2106.09685) by peft, also on a model without values, on the device `meta`.

The invariant: weights that are missing in a folder are refused by name (`transformers` alone would initialise them at random).
No noise such as dropout is active, whatever the model's configuration says. Each name in `engine.lora.target_modules` has an
adapter; a layer where this is impossible is refused by name.

Some rotary positions depend on a length: in `transformers` on the longest row so far, in vLLM on `max_model_len`, once and for
all. Here they are fixed as in vLLM. longrope (arXiv 2402.13753) uses its long factors for every position if `max_model_len`
exceeds the length before scaling, else the short ones; with dynamic scaling the model is used up to the length before scaling
only. If `max_model_len` is not set, our own vLLM is started with the length before scaling.
"""

from __future__ import annotations

import copy
import difflib
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning.errors import EngineError, MissingExtraError
from lightning.policy_server.model_folder import growing_positions, quantisation
from lightning.policy_server.vllm_arguments import argument

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    from lightning.config import LoraConfig
    from lightning.config.sections import PolicyServerConfig

_NOISE = re.compile("drop|jitter|noise")
"""Matches the names of settings that are probabilities or widths of noise."""


def gradient_mode(model: nn.Module) -> None:
    """Put a model into the mode in which gradients are computed: evaluation mode, without any noise. Layers with gradient
    checkpointing are put into training mode, because they recompute their activations in no other; their noise is set to 0."""
    model.eval()
    layers = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    inner = [layer for layer in layers if not hasattr(layer, "gradient_checkpointing_enable")]
    for layer in inner or layers:  # older code checks the mode of the whole trunk
        layer.training = True
        for owner in (layer, getattr(layer, "config", None)):
            for name, value in list(getattr(owner, "__dict__", {}).items()):
                if isinstance(value, float) and _NOISE.search(name):
                    setattr(owner, name, 0.0)


def read_model(folder: Path, kind: Any = None, **how: Any) -> PreTrainedModel:
    """Load the model of a folder by an auto class of `transformers`, `kind` (None: `AutoModelForCausalLM`). `how` are further
    arguments of `from_pretrained`. On the device `meta` only names and shapes of tensors are read.

    Raises `EngineError`, naming the folder, if it is no model folder, cannot be read, or lacks tensors.
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
    """Raise `EngineError` if a folder has no `config.json`, so that it is no model folder."""
    if not (folder / "config.json").is_file():
        raise EngineError(
            f"{folder} is not a model folder: it has no config.json. Give a folder that transformers can load"
        )


def vocab_size(folder: Path) -> int:
    """Return the number of tokens of the model in a folder, by its configuration. Raises `EngineError` for a folder that has
    none."""
    check_config(folder)
    from transformers import AutoConfig

    try:
        return int(AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config().vocab_size)
    except (OSError, ValueError, AttributeError) as error:
        raise EngineError(f"cannot read the model's configuration in {folder}: {error}") from error


def _keep_layout(model: Any) -> None:
    """Remove the conversion from FP8 from the rules by which transformers restores a folder's layout when weights are written;
    renaming and fusing stay. Otherwise transformers would also quantise tensors that were never FP8; `as_stored` does it
    right."""
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
    """Inside the block `torch.equal` compares tensors on `meta`, which have no values, by their shapes. transformers compares
    an output layer with its embedding if a folder stores both, to check that they are tied."""

    class Equal(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.equal and args[0].is_meta:
                return args[0].shape == args[1].shape
            return func(*args, **(kwargs or {}))

    with Equal():
        yield


@contextmanager
def _quietly() -> Iterator[None]:
    """Inside the block transformers shows no progress bars and no table of unused tensors, which `Engine.check` reports."""
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
    """Return the `id`s of a model's tensors that text does not need, such as those of a vision tower; they are not trained."""
    base = unwrapped(model)
    if base.config.get_text_config() is base.config:
        return set()
    text = [base.get_decoder(), base.get_output_embeddings()]
    needed = {id(tensor) for part in text for tensor in part.state_dict(keep_vars=True).values()}
    return {id(tensor) for tensor in model.state_dict(keep_vars=True).values()} - needed


def unwrapped(model: nn.Module) -> PreTrainedModel:
    """Return the model as transformers loaded it, without peft's wrapper."""
    base: Any = cast("Any", model).get_base_model() if hasattr(model, "get_base_model") else model
    return cast("PreTrainedModel", base)


def original_names(model: PreTrainedModel, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return weights with the names and in the layout of model files, which transformers 5 changes for some families when it
    loads them."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4 loads weights under the names of the file
        return weights
    reverted: dict[str, torch.Tensor] = revert_weight_conversion(model, weights)
    return reverted


def names_and_shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the weights that `whole_weights` returns, for a model on the device `meta`."""
    beside, seen = beside_text(model), set[int]()
    found: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in beside and id(tensor) not in seen:
            found[name] = tensor.detach()
        seen.add(id(tensor))
    return {name: tuple(tensor.shape) for name, tensor in original_names(model, found).items()}


UNKNOWN = 0
"""Stands for the `max_model_len` of an attached policy server, which is not known here."""


def served_length(config: PolicyServerConfig) -> int | None:
    """Return the `max_model_len` of the policy server: None if our own server may choose it, `UNKNOWN` if it is not set and the
    server is attached, or cannot be read from the server's arguments."""
    given = argument(config.args, "--max-model-len")
    if given:
        return int(given) if given.isdigit() else UNKNOWN
    return config.max_model_len or (UNKNOWN if config.attach else None)


def fix_positions(model: nn.Module, folder: Path, max_model_len: int | None) -> int | None:
    """Fix a model's rotary frequencies as vLLM does with this `max_model_len` (None: our own vLLM without a set length).
    Returns the number of positions that vLLM serves, None if unknown. Raises `EngineError`, naming the setting, if the model
    cannot compute the positions as vLLM does."""
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
    """Give a longrope module its frequencies for rows longer than `length`, at every position. Other modules are left alone."""
    kinds: dict[str | None, str] | str | None = getattr(module, "rope_type", None)
    for layer, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
        if kind != "longrope":
            continue
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        prefix, which = (f"{layer}_", {"layer_type": layer}) if layer else ("", {})
        buffer = getattr(module, f"{prefix}inv_freq")
        long, _ = ROPE_INIT_FUNCTIONS[kind](module.config, buffer.device, seq_len=length + 1, **which)
        module.register_buffer(f"{prefix}inv_freq", long, persistent=False)
        module.rope_type = kinds | {layer: "default"} if isinstance(kinds, dict) else "default"  # it never changes
        kinds = module.rope_type


WRAPPER = "base_model.model."
"""peft's prefix of the names in a model that it wraps."""


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


def base_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model with adapters, without the adapters. The copy has modules of its own, but the tensors are the
    model's: frozen parameters and buffers are in memory once."""
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    for key, layer in adapted_layers(twin).items():
        twin.set_submodule(key.removesuffix(".weight"), layer.get_base_layer())
    if hasattr(twin, "peft_config"):
        del twin.peft_config
    return twin


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
    """Return the layers that have an active adapter, by the names of their matrices. Of several policies on one base the
    adapters of one are active."""
    return {
        f"{name.removeprefix(WRAPPER)}.weight": layer
        for name, layer in model.named_modules()
        if _active(layer) is not None
    }


def _active(layer: Any) -> str | None:
    """Return peft's name of a layer's active adapter; None if the layer has none."""
    held = (*getattr(layer, "lora_A", ()), *getattr(layer, "lora_embedding_A", ()))
    return next((name for name in held if name in layer.active_adapters), None)


def factors(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an adapter's A (rank, in) and B (out, rank). For a table of embeddings the input counts as a one-hot vector."""
    name = _active(layer)
    if name in layer.lora_A:
        return layer.lora_A[name].weight, layer.lora_B[name].weight
    return layer.lora_embedding_A[name], layer.lora_embedding_B[name]


def scaling_of(layer: Any) -> float:
    """Return the factor of an adapter's B A, alpha / rank."""
    return float(layer.scaling[_active(layer)])


def is_transposed(layer: Any) -> bool:
    """Whether a layer stores its matrix as (in, out), as tables of embeddings and GPT-2's layers do."""
    return bool(getattr(layer, "fan_in_fan_out", False)) or _active(layer) not in layer.lora_A


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
    delta = (up @ down) * scaling_of(layer)
    return delta.T if is_transposed(layer) else delta
