"""Which device verl computes on. Importing this imports neither torch nor verl.

The invariant: the choice is made before verl is imported, in the trainer and in every worker alike.
"""

from __future__ import annotations

import os
import sys

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
    if device == "cuda" and os.environ.get(_VARIABLE) == "cpu":
        del os.environ[_VARIABLE]
    os.environ.update(environment(device, local=False))
    return device


def environment(device: str, *, local: bool) -> dict[str, str]:
    """What a worker's environment must have. On this machine that is also where modules lie: a loss may be anybody's."""
    chosen = {_VARIABLE: "cpu"} if device == "cpu" else {}
    found = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(path or os.getcwd() for path in sys.path))} if local else {}  # noqa: PTH109
    return {**chosen, **found, "TOKENIZERS_PARALLELISM": "false"}
