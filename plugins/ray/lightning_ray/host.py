"""What runs on a node of the cluster: an actor with a process runner of its own.

The invariant: an agent never runs in the actor's process, so neither a crash nor a hang of an agent costs the actor; what the
actor says of an agent is bytes of JSON.
"""

from __future__ import annotations

import lightning
from lightning.config import RunnerConfig
from lightning.errors import LightningError
from lightning.runner.outcomes import encode_outcome
from lightning.runner.process import ProcessRunner


class AgentHost:
    """The actor. It dies with its worker processes, and they with it."""

    def __init__(self, shipped: bytes, config: str) -> None:
        self._runner = ProcessRunner(shipped, RunnerConfig.model_validate_json(config))

    async def start(self, version: str) -> str:
        """Load the agent; return what is wrong, or nothing. `version` is the trainer's release."""
        if version != lightning.__version__:
            return f"a node of the Ray cluster has lightning {lightning.__version__}, the trainer {version}"
        try:
            await self._runner.start()
        except LightningError as error:
            return str(error)
        return ""

    async def run(self, request: bytes) -> bytes:
        """Run the agent on an encoded request; return the encoded outcome. Cancelling this kills the agent."""
        return encode_outcome(await self._runner.answer(request))
