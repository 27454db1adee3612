"""Calc-X with GRPO: the numbers of the loss; `settings.toml` has the others."""

from __future__ import annotations

from lightning_examples.paper.calcx.agent import agent
from lightning_examples.paper.recipe import Recipe

RECIPE = Recipe(
    agent=lambda _folder: agent,
    # Published: 4 (with a model of 1.5B). Only groups with both right and wrong rollouts teach. With a success rate of 0.8,
    # 1 - 0.8^n - 0.2^n of them are mixed, if all problems were alike: 59 % with 4, 83 % with 8.
    group_size=8,
)
