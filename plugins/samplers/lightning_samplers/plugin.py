"""Samplers and an order of tasks, as a plugin: rollouts that go on while the engine trains, rollouts that were recorded before,
and the tasks that will probably teach most."""

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
    """`async` where tokens may be stale, `recorded` where a run is trained on a record."""
    from lightning_samplers.async_collection import Pipeline
    from lightning_samplers.recorded import RecordedSampler

    register("async", lambda asked: Pipeline(asked) if asked.config.trainer.max_staleness else None)
    register("recorded", lambda asked: RecordedSampler(asked) if asked.recorded is not None else None)


@hookimpl
def register_orders(register: Callable[[str, Callable[[Sequence[Task], TrainerConfig], TaskOrder]], None]) -> None:
    """`learnable`."""
    from lightning_samplers.task_choice import TaskChoice

    register("learnable", lambda tasks, config: TaskChoice(tasks, config.seed, config.policy_fault))
