"""`remote`: the runner of a trainer whose agents run elsewhere.

The invariant: this process leases nothing; any program with the server's URL and a token of the scope `runner` may lease.
"""

from __future__ import annotations

import logging

from lightning.config import Config
from lightning.config.fields import toml_value
from lightning.errors import RunnerError
from lightning.runner.protocol import Agent
from lightning.types import LLM, Lease, Outcome
from lightning_sandbox.config import SandboxConfig

logger = logging.getLogger(__name__)


class RemoteRunner:
    """Runs no agents: they run wherever `lightning runner` (or another program that speaks the control API) is started."""

    concurrency = 0

    async def start(self) -> None:
        """Do nothing."""

    async def run(self, lease: Lease, llm: LLM) -> Outcome:
        """Raise `RunnerError`, because agents run elsewhere."""
        raise RunnerError(
            "runner='remote' runs no agents in this process: start `lightning runner` where the agents are to run"
        )

    async def close(self) -> None:
        """Do nothing: clients go on, and wait for the next trainer or server."""


def remote_runner(agent: Agent, config: Config) -> RemoteRunner:
    """Make the runner, and warn of settings that have an effect in the clients only."""
    sandboxed = SandboxConfig.of(config)
    if sandboxed.tool_limits:
        logger.warning(
            "runner.tool_limits has no effect in this process: with runner='remote' the tools run in the clients. Start the "
            "clients with `lightning runner --set runner.tool_limits='%s'`. All clients on one machine share each limit",
            toml_value(sandboxed.tool_limits),
        )
    if sandboxed.sandbox != "none":
        logger.warning(
            "runner.sandbox=%r has no effect in this process: with runner='remote' the agents run in the clients. Start the "
            "clients with `lightning runner --set runner.sandbox=%s`",
            sandboxed.sandbox,
            sandboxed.sandbox,
        )
    return RemoteRunner()
