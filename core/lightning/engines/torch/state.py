"""The training state on disk: safetensors for tensors, JSON for the rest, never pickle.

The invariant: training continues bit for bit from a state that was saved and loaded. So the state holds the trained weights in
their master precision (the head's too), both moments and the step count of every parameter, torch's random state, and the
micro-batch size.

A state with a weight or moment that is not finite is neither written nor read, because nothing can be trained from it, and good
checkpoints would be deleted to make room for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from lightning.engines.files import recover, whole_folder
from lightning.engines.protocol import OptimizerConfig
from lightning.engines.step import CURES, same_head
from lightning.errors import EngineError
from lightning.installation import other_format

FORMAT = 2
_WEIGHTS, _OPTIMIZER, _RANDOM, _STATE = (
    "weights.safetensors",
    "optimizer.safetensors",
    "random.safetensors",
    "state.json",
)
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True, slots=True)
class Progress:
    """The part of a state besides tensors: the number of steps taken, the micro-batch size that memory has allowed so far, the
    optimizer's settings, and the head as text (empty without a head)."""

    steps: int
    tokens_per_microbatch: int
    optimizer: OptimizerConfig
    head: str = ""


def save_state(
    folder: Path,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    device: torch.device,
) -> None:
    """Write the training state to `folder`, atomically. Raises `EngineError`, and writes nothing, if a number is not finite."""
    moments = {
        f"{name}|{moment}": optimizer.state[parameter][moment].contiguous()
        for name, parameter in parameters.items()
        for moment in _MOMENTS
        if moment in optimizer.state.get(parameter, {})
    }
    broken = _not_finite(parameters) or _not_finite(moments)
    if broken:
        raise EngineError(
            f"{folder} is not written, because {broken}: {CURES}, and resume the run from the checkpoint before"
        )
    random = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state(device)
    with whole_folder(folder) as path:
        save_file({name: parameter.detach().contiguous() for name, parameter in parameters.items()}, path / _WEIGHTS)
        save_file(moments, path / _OPTIMIZER)
        save_file(random, path / _RANDOM)
        (path / _STATE).write_text(json.dumps({"format": FORMAT, **asdict(progress)}, indent=2) + "\n")


def load_state(
    folder: Path,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    *,
    head: str = "",
) -> Progress:
    """Restore the state that `save_state` wrote into the model and the optimizer.

    Files are read on the CPU, and weights are then copied into the parameters, so that the device needs further room for the
    moments only. Raises `EngineError`, before anything is changed, if the folder is missing, broken, of another model, or was
    not saved with this `head`.
    """
    recover(folder)
    try:
        state = json.loads((folder / _STATE).read_text())
        if state.get("format") != FORMAT:
            raise EngineError(other_format(f"{folder} has format {state.get('format')}", f"format {FORMAT}"))
        weights = load_file(folder / _WEIGHTS)
        moments = load_file(folder / _OPTIMIZER)
        random = load_file(folder / _RANDOM)
        progress = Progress(
            steps=int(state["steps"]),
            tokens_per_microbatch=int(state["tokens_per_microbatch"]),
            optimizer=OptimizerConfig(**{**state["optimizer"], "betas": tuple(state["optimizer"]["betas"])}),
            head=str(state["head"]),
        )
        if broken := _not_finite(weights) or _not_finite(moments):
            raise ValueError(broken)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        if isinstance(error, EngineError):
            raise
        raise EngineError(
            f"{folder} is not a whole training state ({error}): remove that folder. With a plugin that takes recorded steps "
            "again, a resume then continues from the checkpoint before it, or from the start, and repeats the steps since then "
            "from the store. Without one the run cannot go on if these steps changed the weights: give another `out`"
        ) from error
    same_head(folder, progress.head, head)
    _refuse_other_model(folder, parameters, weights)
    restored = {
        parameter: {key: moments[f"{name}|{key}"].to(device) for key in _MOMENTS if f"{name}|{key}" in moments}
        for name, parameter in parameters.items()
    }
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    optimizer.state.clear()
    optimizer.state.update({parameter: found for parameter, found in restored.items() if found})
    torch.set_rng_state(random["cpu"])
    if device.type == "cuda" and "cuda" in random:
        torch.cuda.set_rng_state(random["cuda"], device)
    return progress


def _not_finite(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return, for messages, the first tensor that has a number which is not finite; empty if there is none."""
    for name, tensor in tensors.items():
        if tensor.numel() and not all(map(math.isfinite, map(float, torch.aminmax(tensor.detach())))):  # makes no copy
            return f"{name} has numbers that are not finite"
    return ""


def _refuse_other_model(
    folder: Path, parameters: Mapping[str, nn.Parameter], weights: Mapping[str, torch.Tensor]
) -> None:
    """Raise `EngineError` if the weights of a state differ from these parameters in name, shape or dtype."""
    mine = {name: (tuple(value.shape), value.dtype) for name, value in parameters.items()}
    theirs = {name: (tuple(value.shape), value.dtype) for name, value in weights.items()}
    different = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
    if different:
        raise EngineError(
            f"the training state in {folder} belongs to another model, dtype or LoRA setting: {len(different)} parameters "
            f"differ, for example {different[0]}"
        )
