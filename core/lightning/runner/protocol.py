"""What executes agents: one attempt in, one outcome out.

The invariant: whatever an agent does (raise, hang, crash its process, return nonsense) becomes an `Outcome`; it never
reaches another agent or the trainer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeAlias

from lightning.types import LLM, Lease, Outcome, Task

Reward: TypeAlias = "float | dict[str, float]"
Agent: TypeAlias = Callable[[Any, LLM], "Reward | Awaitable[Reward]"]
"""`agent(task, llm) -> reward`: sync or async, a function or any object with `__call__`. `task` is a `lightning.Task`."""

__all__ = ["Agent", "Reward", "Runner", "Task"]


class Runner(Protocol):
    """Runs attempts, at most `concurrency` at once. Raises `RunnerError` only when no agent can be run at all."""

    @property
    def concurrency(self) -> int:
        """Attempts at once."""

    async def start(self) -> None:
        """Get ready. Raises `RunnerError` when the agent cannot be run. Idempotent."""

    async def run(self, lease: Lease, llm: LLM) -> Outcome:
        """Run the agent on the leased task. Cancelling this ends the agent."""

    async def close(self) -> None:
        """End every agent that still runs."""
