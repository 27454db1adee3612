"""The plugin `resources`: operations of every store, a command, and a stage at a run's beginning and end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl, later

if TYPE_CHECKING:
    import typer
    from lightning.config import Config
    from lightning.store.operation import OperationGroup
    from lightning.trainer.run_stages import RunStage


@hookimpl
def register_operations(register: Callable[[str, Callable[[], OperationGroup]], None]) -> None:
    """Register the store operations on `resources`."""
    register("resources", later("lightning_resources.operations:RESOURCES"))


@hookimpl
def register_run_stages(register: Callable[[str, Callable[[Config], RunStage | None]], None]) -> None:
    """Register the stage `resources`, which finds a run's prompts and makes its trained weights a version."""
    from lightning_resources.prompts import ResourcesOfRun

    register("resources", lambda config: ResourcesOfRun())


@hookimpl
def register_commands(register: Callable[[str, Callable[[], Callable[..., None] | typer.Typer]], None]) -> None:
    """Register the command `lightning resources`."""
    register(
        "resources",
        later(
            "lightning_resources.command:app", "List, compare and promote versions of prompts, weights and settings."
        ),
    )
