"""The learning rate of each step, as a share of `engine.lr`: the same in every engine.

The invariant: the share depends on the number of steps before alone, so that a resumed run goes on where it was.
"""

from __future__ import annotations

import math

from lightning.engines.protocol import OptimizerConfig


def lr_factor(config: OptimizerConfig, steps: int) -> float:
    """The share of the full rate that the step after `steps` others has.

    It rises linearly over `warmup_steps`. Then it stays, or falls to `min_lr_ratio` at `total_steps`: in a line, or by half a
    cosine (SGDR, arXiv 1608.03983, without restarts). Steps after the last planned one have the lowest share.
    """
    if steps < config.warmup_steps:
        return (steps + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    left = max(1, config.total_steps - config.warmup_steps)
    progress = min(1.0, (steps - config.warmup_steps) / left)
    share = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * share
