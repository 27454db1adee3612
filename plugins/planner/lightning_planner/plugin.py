"""The plugin `planner`: the command `lightning plan`, and the stages that say what a run needs of memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl, later

if TYPE_CHECKING:
    from lightning.config import Config
    from lightning.trainer.run_stages import RunStage


@hookimpl
def register_commands(register: Callable[[str, Callable[[], Callable[..., None]]], None]) -> None:
    """Register the command `plan`."""
    register("plan", later("lightning_planner.command:plan", "Simulate a run on other machines from a recorded one."))


@hookimpl
def register_run_stages(register: Callable[[str, Callable[[Config], RunStage | None]], None]) -> None:
    """Register the run stages `gpu_needs` and `cpu_needs`."""

    def make(config: Config) -> RunStage | None:
        from lightning_planner.needs import on_gpus

        return on_gpus(config)

    def on_cpu(config: Config) -> RunStage:
        from lightning_planner.needs import CpuNeeds

        return CpuNeeds()

    register("gpu_needs", make)
    register("cpu_needs", on_cpu)
