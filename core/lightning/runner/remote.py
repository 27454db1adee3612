"""The runner of a trainer whose agents run in clients: it runs none.

The invariant: nothing is leased in this process; whoever has the server's URL and a token of the scope `runner` may lease.
"""

from __future__ import annotations

from lightning.errors import RunnerError
from lightning.types import LLM, Lease, Outcome


class RemoteRunner:
    """Agents run wherever `lightning runner` (or a program that speaks the control API) is started."""

    concurrency = 0

    async def start(self) -> None:
        """Nothing is started here."""

    async def run(self, lease: Lease, llm: LLM) -> Outcome:
        """Raises `RunnerError`: agents run elsewhere."""
        raise RunnerError(
            "runner='remote' runs no agents in this process: start `lightning runner` where they are to run"
        )

    async def close(self) -> None:
        """Clients go on: they wait for the next trainer, or for a server."""
