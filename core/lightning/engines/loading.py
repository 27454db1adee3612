"""Model folders, read by `transformers`.

The invariant: weights that a folder does not hold whole are refused by name; left to itself, `transformers` makes them up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.engines.model_contents import quantisation
from lightning.errors import EngineError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def read_model(folder: Path, kind: Any = None, **how: Any) -> PreTrainedModel:
    """The model of a folder, by an auto class of `transformers` (`AutoModelForCausalLM` if it is not told), whose
    `from_pretrained` is told `how`; on the device `meta` only names and shapes of tensors are read.

    Raises `EngineError` naming the folder and what is wrong: it is none, it cannot be read, or it lacks tensors.
    """
    from transformers import AutoModelForCausalLM

    if not (folder / "config.json").is_file():
        raise EngineError(
            f"{folder} is not a model folder: it has no config.json. Give a folder that transformers can load"
        )
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
    import torch
    from torch.overrides import TorchFunctionMode

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
