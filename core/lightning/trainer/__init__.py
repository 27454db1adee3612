"""The loop: sample groups, credit, train, serve the result, again.

What it exports is imported when it is first used: whoever only reads a run's summary need not load what trains.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.trainer.summary import Evaluation, Summary
    from lightning.trainer.trainer import Trainer

__all__ = ["Evaluation", "Summary", "Trainer"]

_HOME = {
    "Evaluation": "summary",
    "Summary": "summary",
    "Trainer": "trainer",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'lightning.trainer' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"lightning.trainer.{_HOME[name]}"), name)
    globals()[name] = value
    return value
