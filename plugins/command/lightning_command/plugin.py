"""The plugin `command`: `command:PROGRAM ...` as an agent, and `harbor:FOLDER` as tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lightning.errors import ConfigError
from lightning.hooks import hookimpl, made_later

if TYPE_CHECKING:
    from lightning.runner.protocol import Agent
    from lightning.types import Task


@hookimpl
def register_agents(register: Callable[[str, Callable[[str], Agent]], None]) -> None:
    """Register `command:` as an agent. `harbor:` is registered as well, to explain that it names tasks and no agent."""
    register("command", made_later("lightning_command.agent:from_text"))
    register("harbor", _no_agent)


@hookimpl
def register_tasks(register: Callable[[str, Callable[[str], Sequence[Task]]], None]) -> None:
    """Register `harbor:` as tasks."""
    register("harbor", made_later("lightning_command.harbor:harbor_tasks"))


def _no_agent(text: str) -> Agent:
    raise ConfigError(
        f"harbor:{text} names tasks, and no agent: lightning train command:'claude -p {{task.input}}' --tasks harbor:{text}"
    )
