"""Registers `command:PROGRAM ...` as an agent and `harbor:FOLDER` as tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lightning.errors import ConfigError
from lightning.hooks import hookimpl
from lightning.types import Task

if TYPE_CHECKING:
    from lightning.runner.protocol import Agent


@hookimpl
def register_agents(register: Callable[[str, Callable[[str], Agent]], None]) -> None:
    """See `lightning.hooks`."""
    register("command", _command)
    register("harbor", _no_agent)


@hookimpl
def register_tasks(register: Callable[[str, Callable[[str], Sequence[Task]]], None]) -> None:
    """See `lightning.hooks`."""
    register("harbor", _harbor)


def _command(text: str) -> Agent:
    from lightning_command.agent import from_text

    return from_text(text)


def _harbor(text: str) -> Sequence[Task]:
    from lightning_command.harbor import harbor_tasks

    return harbor_tasks(text)


def _no_agent(text: str) -> Agent:
    raise ConfigError(
        f"harbor:{text} names tasks, and no agent: lightning train command:'claude -p {{task.input}}' --tasks harbor:{text}"
    )
