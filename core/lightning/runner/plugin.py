"""The runners that come with lightning, as a plugin."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl

if TYPE_CHECKING:
    from lightning.config import Config
    from lightning.runner.protocol import Agent, Runner


def process_runner(agent: Agent, config: Config) -> Runner:
    """Make a runner that runs agents in worker processes (`lightning.runner.process`)."""
    from lightning.runner.process import ProcessRunner

    return ProcessRunner(agent, config.runner)


def inline_runner(agent: Agent, config: Config) -> Runner:
    """Make a runner that runs agents in this process (`lightning.runner.inline`)."""
    from lightning.runner.inline import InlineRunner

    return InlineRunner(agent, config.runner)


@hookimpl
def register_runners(register: Callable[[str, Callable[[Agent, Config], Runner]], None]) -> None:
    """Register the runners `process` (the default) and `inline`."""
    register("process", process_runner)
    register("inline", inline_runner)
