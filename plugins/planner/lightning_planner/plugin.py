"""`lightning plan`, as a plugin."""

from __future__ import annotations

from collections.abc import Callable

from lightning.hooks import hookimpl, later


@hookimpl
def register_commands(register: Callable[[str, Callable[[], Callable[..., None]]], None]) -> None:
    """`plan`."""
    register("plan", later("lightning_planner.command:plan", "Simulate a run on other machines from a recorded one."))
