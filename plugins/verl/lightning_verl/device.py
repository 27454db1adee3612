"""The device that verl computes on. Importing this imports neither torch nor verl.

The invariant: the device is chosen before verl is imported, in the trainer and in every worker.
"""

from __future__ import annotations

import os
import sys

from lightning.errors import ConfigError

_VARIABLE = "VERL_PLATFORM"


def choose(device: str) -> str:
    """Choose `cpu` or `cuda` by `engine.device`, tell verl in this process, and return the choice. `auto` looks at this machine
    only: where the GPUs are on other machines, set `cuda`. Raises `ConfigError` for other values."""
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
    """Return the environment variables of a worker. A worker on this machine also gets the paths of modules, since a loss may
    be the user's own."""
    chosen = {_VARIABLE: "cpu"} if device == "cpu" else {}
    found = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(path or os.getcwd() for path in sys.path))} if local else {}  # noqa: PTH109
    return {**chosen, **found, "TOKENIZERS_PARALLELISM": "false"}
