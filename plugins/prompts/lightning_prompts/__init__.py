"""Prompt algorithms: rewards in, a better template out; no weights, no engine."""

from __future__ import annotations

from lightning_prompts.algorithm import PromptAlgorithm
from lightning_prompts.protocol import Bench, BudgetSpentError, OptimizerModel, Trial

__all__ = ["Bench", "BudgetSpentError", "OptimizerModel", "PromptAlgorithm", "Trial"]
