"""The learning rate of each step, as a share of `engine.lr`: the same in every engine.

The invariant: the share depends on the number of steps before alone, so that a resumed run goes on where it was. Steps are
counted, never updates, so several updates in a step have one rate.
"""

from __future__ import annotations

import math

from lightning.engines.protocol import OptimizerConfig


def lr_factor(config: OptimizerConfig, steps: int) -> float:
    """The share of the full rate that the step after `steps` others has.

    It rises linearly over `warmup_steps`. Then it stays, or falls to `min_lr_ratio` at the end of the run's `total_steps`: in a
    line, or by half a cosine (SGDR, arXiv 1608.03983, without restarts). Steps after the last planned one have the lowest
    share. The `begun` steps of the run that this one was forked from count for the warm-up alone.
    """
    if steps < config.warmup_steps:
        return (steps + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    first = max(config.warmup_steps, config.begun)
    progress = min(1.0, (steps - first) / max(1, config.begun + config.total_steps - first))
    share = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * share
