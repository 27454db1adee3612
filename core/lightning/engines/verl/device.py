"""Which device verl computes on. Importing this imports neither torch nor verl.

The invariant: the choice is made before verl is imported, in the trainer and in every worker alike.
"""

from __future__ import annotations

import os

from lightning.errors import ConfigError

_VARIABLE = "VERL_PLATFORM"


def choose(device: str) -> str:
    """`cpu` or `cuda`, by `engine.device`; verl is told so in this process. `auto` looks at this machine only: where the
    GPUs are on others, say `cuda`. Raises `ConfigError` for anything else."""
    if device == "auto":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise ConfigError(
            f"engine.device is {device!r}: the verl engine places its workers itself. Set it to auto, cpu or cuda"
        )
    for name, value in environment(device).items():
        os.environ[name] = value
    return device


def environment(device: str) -> dict[str, str]:
    """What a worker's environment must have."""
    own = {_VARIABLE: "cpu"} if device == "cpu" else {}
    return {**own, "TOKENIZERS_PARALLELISM": "false"}
