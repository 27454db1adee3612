"""The public names of prompt optimisation, imported from the plugin `prompts` at their first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from lightning.errors import MissingExtraError

if TYPE_CHECKING:
    from lightning_prompts import Bench, BudgetSpentError, OptimizerModel, PromptAlgorithm, Trial

__all__ = ["Bench", "BudgetSpentError", "OptimizerModel", "PromptAlgorithm", "Trial"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'lightning.algorithms.prompts' has no attribute {name!r}")
    try:
        module = importlib.import_module("lightning_prompts")
    except ModuleNotFoundError as error:
        if error.name != "lightning_prompts":
            raise
        raise MissingExtraError("prompts", "lightning_prompts") from error
    found: object = getattr(module, name)
    return found
