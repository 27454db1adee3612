"""The training state of a sharded model on disk: safetensors written by all ranks, by torch's distributed checkpoints.

The invariant: no pickle; and what any number of ranks wrote any other number reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

if TYPE_CHECKING:
    from lightning_verl.critic import Learner

_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
_STEP = ".step"


def save_shards(engine: Any, critic: Learner | None, folder: Path, steps: int) -> None:
    """Write every trained weight and, when steps were taken, both moments of each; of a critic, which all ranks have whole,
    one rank's. All ranks must call it."""
    tensors = {**_weights(engine), **_moments(_state(engine) if steps else {}), **(critic.tensors() if critic else {})}
    save(tensors, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))


def load_shards(engine: Any, critic: Learner | None, folder: Path, steps: int, critic_steps: int) -> None:
    """Read what `save_shards` wrote, after so many optimizer steps of each. All ranks must call it."""
    state = _state(engine) if steps else {}
    tensors = {**_weights(engine), **_moments(state)}
    if critic is not None:
        critic.begin(critic_steps)
        tensors |= critic.tensors()
    load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)))
    if steps:
        for name in state:
            if name.endswith(_STEP):
                state[name] = torch.tensor(float(steps))
        set_optimizer_state_dict(engine.module, engine.optimizer, state, options=_OPTIONS)
    else:
        engine.optimizer.state.clear()


def _weights(engine: Any) -> dict[str, torch.Tensor]:
    """All that is trained; they share memory with the parameters."""
    return {f"weight.{name}": value.data for name, value in engine.module.named_parameters() if value.requires_grad}


def _state(engine: Any) -> dict[str, Any]:
    """The optimizer's state by the parameters' names; where no step was taken yet, zeros."""
    found: dict[str, Any] = get_optimizer_state_dict(engine.module, engine.optimizer, options=_OPTIONS)
    return found


def _moments(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        f"optimizer.{name}": value
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and not name.endswith(_STEP)
    }
