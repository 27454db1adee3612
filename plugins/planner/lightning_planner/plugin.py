"""The plugin `planner`: the command `lightning plan`."""

from __future__ import annotations

from collections.abc import Callable

from lightning.hooks import hookimpl, later


@hookimpl
def register_commands(register: Callable[[str, Callable[[], Callable[..., None]]], None]) -> None:
    """Register the command `plan`."""
    register("plan", later("lightning_planner.command:plan", "Simulate a run on other machines from a recorded one."))
