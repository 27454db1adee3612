"""Calc-X with GRPO: the numbers of the loss; `settings.toml` has the others."""

from __future__ import annotations

from pathlib import Path

from lightning import LightningRL

from lightning_examples.multi_gpu.calcx.agent import agent
from lightning_examples.multi_gpu.recipe import Recipe


def algorithm() -> LightningRL:
    """GRPO without a KL penalty."""
    return LightningRL(
        "grpo",
        # Published: 4 (with a model of 1.5B). Only groups with both right and wrong rollouts teach. With a success rate of 0.8,
        # 1 - 0.8^n - 0.2^n of them are mixed, if all problems were alike: 59 % with 4, 83 % with 8.
        group_size=8,
        clip_low=0.2,  # published; PPO's own (arXiv 1707.06347)
        clip_high=0.3,  # published; DAPO (arXiv 2503.14476, §3.1) has 0.28 for the same reason: rare tokens may become likely
        kl_coefficient=0.0,  # published, and DAPO's §2.3: a verifiable reward needs no leash, and saves a forward pass
        entropy_coefficient=0.0,  # published
    )


RECIPE = Recipe(
    agent=lambda _folder: agent,
    settings=Path(__file__).with_name("settings.toml"),
    algorithm=algorithm,
)
