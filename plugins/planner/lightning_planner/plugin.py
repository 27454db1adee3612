"""`lightning plan`, as a plugin."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl

if TYPE_CHECKING:
    from lightning.cli.app import Command


@hookimpl
def register_commands(register: Callable[[str, Callable[[], Command]], None]) -> None:
    """`plan`."""
    register("plan", plan_command)


def plan_command() -> Command:
    """Simulate a run on other machines from a recorded one."""
    from lightning_planner.command import plan

    return plan
