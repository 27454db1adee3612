"""The actor that runs agents on a node of a Ray cluster, in worker processes of its own.

The invariant: an agent never runs in the actor's own process, so that neither a crash nor a hang of an agent costs the actor.
The actor returns an agent's outcome as bytes of JSON.
"""

from __future__ import annotations

import json

import lightning
from lightning.config import config_model
from lightning.errors import LightningError
from lightning.runner.outcomes import encode_outcome
from lightning.runner.process import ProcessRunner
from pydantic import ValidationError


class AgentHost:
    """The actor that runs agents. Its worker processes end with it."""

    def __init__(self, shipped: bytes, config: str) -> None:
        self._shipped, self._config = shipped, config
        self._runner: ProcessRunner

    async def start(self, version: str) -> str:
        """Load the agent, and return what is wrong; empty for nothing. `version` is the trainer's release, which the node must
        have."""
        if version != lightning.__version__:
            return f"a node of the Ray cluster has lightning {lightning.__version__}, the trainer {version}"
        try:
            settings = config_model().model_validate({"runner": json.loads(self._config)}).runner
            self._runner = ProcessRunner(self._shipped, settings)
            await self._runner.start()
        except (LightningError, ValidationError) as error:
            return str(error)
        return ""

    async def run(self, request: bytes) -> bytes:
        """Run the agent on an encoded request, and return the encoded outcome. Cancelling this kills the agent."""
        return encode_outcome(await self._runner.answer(request))
