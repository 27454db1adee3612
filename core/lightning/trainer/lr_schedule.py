"""The optimizer of a run, and the learning rate of each of its steps.

The invariant: the rate depends on the settings and on the number of committed steps before alone, so that a resumed run goes on
where it was, and a step that is taken again has its own rate. Steps are counted, never updates, so several updates in a step
have one rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from lightning.config import Config
from lightning.engines.protocol import Head, OptimizerConfig
from lightning.plugins import plugins
from lightning.types import Json

EARLIER_STEPS: Final = "earlier_steps"
"""The key of a forked run's configuration that says how many steps led to the training state that it began with, in all the
runs before it. Absent where it began with weights alone: the optimizer is then a fresh one."""


def lr_share(config: Config, step: int, earlier: int = 0) -> float:
    """The share of `engine.lr` that a step of the run has.

    It rises linearly over `warmup_steps`. Then it stays, or falls to `min_lr_ratio` at the end of the run's own
    `trainer.steps`: in a line, or by half a cosine (SGDR, arXiv 1608.03983, without restarts). Steps after the last planned
    one have the lowest share. The `earlier` steps of the runs that this one was forked from count for the warm-up alone.
    """
    engine = config.engine
    if earlier + step <= engine.warmup_steps:
        return (earlier + step) / engine.warmup_steps
    if engine.lr_schedule == "constant":
        return 1.0
    risen = max(0, engine.warmup_steps - earlier)
    progress = min(1.0, (step - 1 - risen) / max(1, config.trainer.steps - risen))
    share = 1.0 - progress if engine.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return engine.min_lr_ratio + (1.0 - engine.min_lr_ratio) * share


def rate_of(config: Config, run: Mapping[str, Json], step: int) -> float:
    """The learning rate of a step; `run` is the run's recorded configuration."""
    return full_rate(config) * lr_share(config, step, earlier_steps(run))


def full_rate(config: Config) -> float:
    """`engine.lr`, or the default of an optimizer."""
    return config.engine.lr or OptimizerConfig().lr


def optimizer_of(config: Config) -> OptimizerConfig:
    """The optimizer of the settings."""
    engine = config.engine
    return OptimizerConfig(
        full_rate(config),
        engine.betas,
        engine.weight_decay,
        engine.eps,
        engine.max_grad_norm,
        engine.minibatches,
        engine.epochs,
    )


def made_head(config: Config, recorded: object) -> Head | None:
    """The head of the settings that a run's record says, or whose name is given; None without one. Raises `PluginError` where
    no plugin has it."""
    name = str(recorded or "").partition(" ")[0]
    return plugins().head(name)(config) if name else None


def earlier_steps(run: Mapping[str, Json]) -> int:
    """How many steps led to the training state that a run began with; `run` is its recorded configuration."""
    return int(str(run.get(EARLIER_STEPS, 0)))
