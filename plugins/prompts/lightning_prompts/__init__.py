"""Prompt algorithms, which use rewards to find a better prompt template. They train no weights and need no engine."""

from __future__ import annotations

from lightning_prompts.algorithm import PromptAlgorithm
from lightning_prompts.protocol import Bench, BudgetSpentError, OptimizerModel, Trial

__all__ = ["Bench", "BudgetSpentError", "OptimizerModel", "PromptAlgorithm", "Trial"]
