"""The learning rate of each optimizer step, as a share of `engine.lr`: the same in every engine.

The invariant: the share depends on the number of steps before alone, so that a resumed run goes on where it was.
"""

from __future__ import annotations

from lightning.engines.protocol import OptimizerConfig


def lr_factor(config: OptimizerConfig, steps: int) -> float:
    """The share of the full rate that the step after `steps` others has: it rises linearly over `engine.warmup_steps`."""
    return min(1.0, (steps + 1) / max(1, config.warmup_steps))
