"""One run's policy as a gateway sees it: its policy servers, whether they may be asked now, and which version they have.

The invariant: what is dispatched goes to the run's own servers, while the gate is open, with the version they have then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import aiohttp

from lightning.asyncio_utils import end
from lightning.gateway.fleet.versions import VersionBook
from lightning.gateway.shown_tools import ShownTools
from lightning.gateway.update_gate import Gate
from lightning.gateway.upstream.servers import GRACE, Pool, Upstream


def _nothing() -> None:
    """For a policy that nobody else can change."""


class Policy:
    """The parts that every call of a run goes through. `hold_timeout` is in seconds.

    `check` is called before anything is taken for known: the member of a fleet looks at its clock there. With a `seed`
    calls that have none are given one. `used` is when the last call came (the loop's clock);
    `told` whether it has been heard which servers there are.
    """

    def __init__(
        self,
        upstreams: Sequence[Upstream],
        hold_timeout: float,
        *,
        version: int = 0,
        seed: int | None = None,
        check: Callable[[], None] = _nothing,
    ) -> None:
        self.pool = Pool(upstreams, grace=min(GRACE, hold_timeout))
        self.gate = Gate(hold_timeout)
        self.book = VersionBook(version)
        self.seed, self.check = seed, check
        self.tools = ShownTools()
        self.used = 0.0
        self.told = bool(upstreams)
        self._health: asyncio.Task[None] | None = None
        self.pool.on_other = self._lose_calls

    def _lose_calls(self) -> None:
        self.book.lose()
        self.gate.stir()

    def check_health(self, session: aiohttp.ClientSession) -> None:
        """Look after the servers from now on, until `close`."""
        if self._health is None:
            self._health = asyncio.create_task(self.pool.watch(session), name="lightning-gateway-health")

    async def close(self) -> None:
        """Look no longer."""
        await self.tools.close()
        if self._health is not None:
            await end(self._health)
            self._health = None
