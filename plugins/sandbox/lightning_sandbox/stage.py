"""Where the sandbox stands around attempts: it encloses the processes of agents (`runner.sandbox`), and tells the sandboxes
that agents make for their programs what to hide (`runner.sandbox_hidden`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, ClassVar, Final

from lightning.runner.stages import AttemptStage

from lightning_sandbox import bwrap
from lightning_sandbox.network import targets
from lightning_sandbox.sandbox import Sandbox, bubblewrap, check

if TYPE_CHECKING:
    from lightning.config import RunnerConfig

SANDBOX: Final = "sandbox"


class HidingStage(AttemptStage):
    """Agents' own sandboxes hide what the runner is told to hide."""

    api = 1
    carries_out: ClassVar[Collection[str]] = ("sandbox_network", "sandbox_environment", "sandbox_files")

    def __init__(self, config: RunnerConfig) -> None:
        self._hidden = config.sandbox_hidden

    def installed(self) -> Callable[[], None]:
        """From now on they do."""
        return bwrap.hide(self._hidden)


class SandboxStage(HidingStage):
    """Each process of agents is alone in a sandbox."""

    carries_out = ("sandbox", *HidingStage.carries_out)

    def __init__(self, config: RunnerConfig) -> None:
        super().__init__(config)
        self._files, self._variables = config.sandbox_files, config.sandbox_environment
        self._network = config.sandbox_network

    async def begun(self) -> None:
        """Raises `RunnerError` when there can be no sandbox, and `ConfigError` for a host that cannot be opened."""
        await asyncio.to_thread(check)
        targets("", self._network)  # or the first rollout would find what is wrong with it

    def enclosure(self, base_url: str, files: Sequence[str]) -> Sandbox:
        """A sandbox from which this gateway can be reached, and what `runner.sandbox_network` has."""
        network = targets(base_url, self._network) if base_url else ()
        return bubblewrap((*self._files, *files), self._hidden, self._variables, network)


def stage_for(config: RunnerConfig) -> AttemptStage:
    """The stage of a runner with these settings."""
    return HidingStage(config) if config.sandbox == "none" else SandboxStage(config)
