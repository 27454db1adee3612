"""Registers `command:PROGRAM ...` as an agent."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl

if TYPE_CHECKING:
    from lightning.runner.protocol import Agent


@hookimpl
def register_agents(register: Callable[[str, Callable[[str], Agent]], None]) -> None:
    """See `lightning.hooks`."""
    register("command", _command)


def _command(text: str) -> Agent:
    from lightning_command.agent import from_text

    return from_text(text)
