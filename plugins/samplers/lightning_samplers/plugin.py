"""The samplers plugin: sampling while the engine trains, training on recorded rollouts, and the order of tasks `learnable`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl

if TYPE_CHECKING:
    from lightning.config import TrainerConfig
    from lightning.trainer.samplers import Asked, Sampler, TaskOrder
    from lightning.types import Task


@hookimpl
def register_samplers(register: Callable[[str, Callable[[Asked], Sampler | None]], None]) -> None:
    """Register the sampler `async` for runs with `trainer.max_staleness`, and `recorded` for runs on a record."""
    from lightning_samplers.async_collection import Pipeline
    from lightning_samplers.recorded import RecordedSampler

    register("async", lambda asked: Pipeline(asked) if asked.config.trainer.max_staleness else None)
    register("recorded", lambda asked: RecordedSampler(asked) if asked.recorded is not None else None)


@hookimpl
def register_orders(register: Callable[[str, Callable[[Sequence[Task], TrainerConfig], TaskOrder]], None]) -> None:
    """Register the order of tasks `learnable`."""
    from lightning_samplers.task_choice import TaskChoice

    register("learnable", lambda tasks, config: TaskChoice(tasks, config.seed, config.policy_fault))
