"""`lightning plan`, as a plugin."""

from __future__ import annotations

from collections.abc import Callable

from lightning.hooks import hookimpl


@hookimpl
def register_commands(register: Callable[[str, Callable[[], Callable[..., None]]], None]) -> None:
    """`plan`."""
    register("plan", plan_command)


def plan_command() -> Callable[..., None]:
    """Simulate a run on other machines from a recorded one."""
    from lightning_planner.command import plan

    return plan
