"""The interface of runners, which execute agents: an attempt goes in, an outcome comes out.

The invariant: whatever an agent does (raise, hang, crash its process, return nonsense) becomes an `Outcome`; it never
reaches another agent or the trainer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

from lightning.types import LLM, Lease, Outcome, Task

Reward: TypeAlias = "float | dict[str, float]"
Agent: TypeAlias = Callable[[Any, LLM], "Reward | Awaitable[Reward]"]
"""`agent(task, llm) -> reward`: sync or async, a function or any object with `__call__`. `task` is a `lightning.Task`."""

__all__ = ["Agent", "Reward", "Runner", "StagedRunner", "Task"]


class Runner(Protocol):
    """Runs attempts, at most `concurrency` at once. Raises `RunnerError` only when no agent can be run at all."""

    @property
    def concurrency(self) -> int:
        """The largest number of attempts that run at once. With 0 none run in this process, and `run` is never called."""

    async def start(self) -> None:
        """Prepare to run attempts. Raises `RunnerError` if the agent cannot be run. Idempotent."""

    async def run(self, lease: Lease, llm: LLM) -> Outcome:
        """Run the agent on the leased task. Cancelling this ends the agent."""

    async def close(self) -> None:
        """End every agent that still runs."""


@runtime_checkable
class StagedRunner(Protocol):
    """A runner that asks the stages of plugins itself, not in clients on other machines."""

    @property
    def stages(self) -> Mapping[str, str]:
        """The names of these stages, in their order, with the versions of their distributions."""
