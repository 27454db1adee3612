"""Algorithms: objects that turn the finished groups of a step into training rows and a loss."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.algorithms.custom import from_batch, from_loss
    from lightning.algorithms.intake import Intake
    from lightning.algorithms.protocol import Algorithm, Batch

__all__ = ["Algorithm", "Batch", "Intake", "from_batch", "from_loss"]

_HOME = {
    "Algorithm": "lightning.algorithms.protocol",
    "Batch": "lightning.algorithms.protocol",
    "Intake": "lightning.algorithms.intake",
    "from_batch": "lightning.algorithms.custom",
    "from_loss": "lightning.algorithms.custom",
}


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'lightning.algorithms' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value
