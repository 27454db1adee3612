"""The agents of a run that clients run, all of them or beside the trainer's own runner.

The invariant: this process leases nothing for clients, and hears of each rollout that they end; what was lost on its last
attempt ends although nobody leases any more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress

from lightning.asyncio_utils import unless
from lightning.errors import StaleAttemptError
from lightning.runner.lease_loop import Source
from lightning.safe_text import counted
from lightning.trainer.agents import LOOK_SECONDS, Agents
from lightning.types import Fault, Outcome, Rollout, Status

from lightning_server.protocol import ClientRunner, Site

logger = logging.getLogger(__name__)

SETTLE_SECONDS = 0.2
"""How long news are gathered before the store is asked: with a hundred clients there is always some."""
ROOM_SECONDS = 0.25
"""How often to see whether clients have taken what waits, while more groups may begin."""
SILENCE_SECONDS = 30.0
"""How long rollouts wait for a client until a warning says so, and between two warnings."""


class ClientAgents(Agents):
    """The agents of one run, where clients run some of them, or all: a `runner` whose `concurrency` is 0 runs none in this
    process. `site` is what clients need, for a runner that starts them."""

    site: Site | None = None
    _silent_since = 0.0

    async def attend(self) -> None:
        """Keep the clients of a `ClientRunner` running, until cancelled."""
        if self.site is not None and isinstance(self.runner, ClientRunner):
            await self.runner.attend(self.site)

    async def work(self, told: Callable[[Rollout], None], source: Source | None = None) -> None:
        """As `Agents.work`. Where all agents run in clients, wait until these have ended every expected rollout; with a source
        let groups begin, until cancelled."""
        if self.runner.concurrency:
            await super().work(told, source)
            return
        self.told, self._silent_since = told, time.monotonic()
        changed = asyncio.Event() if source is None else source.changed
        async with self.store.watch(self.run) as watch:
            while True:
                await self.store.lease(self.run, f"{self.run}/trainer", limit=0)  # ends what no attempt is left for
                if source is not None:
                    await self._end_unwanted(source)
                await self.look()
                if source is None and not self.expected:
                    return
                more = source is not None and await self._refill(source)
                await self._check_silence()
                await unless(watch.wait(ROOM_SECONDS if more else LOOK_SECONDS), changed.wait())
                changed.clear()
                await asyncio.sleep(SETTLE_SECONDS)

    async def look_beside(self) -> None:
        """Look for rollouts that clients have ended as soon as the store has news, until cancelled."""
        async with self.store.watch(self.run) as watch:
            while True:
                await self.look()
                await watch.wait(LOOK_SECONDS)
                await asyncio.sleep(SETTLE_SECONDS)

    def tell(self, rollout: Rollout) -> None:
        """Tell of the end of a rollout, once, if it is waited for: somebody works."""
        self._silent_since = time.monotonic()
        super().tell(rollout)

    async def _end_unwanted(self, source: Source) -> None:
        """End the attempts that the source wants no more. Their calls are refused from then on, and their clients notice when
        they renew the leases. A rollout that waits for a client is ended once one has taken it."""
        for rollout in [each for each in self.expected.values() if source.unwanted(each)]:
            now, why = await self.store.get_rollout(rollout.id), source.unwanted(rollout)
            if now is not None and now.status is Status.RUNNING:
                with suppress(StaleAttemptError):  # it has ended meanwhile, or a later attempt has begun
                    await self.store.complete(now.id, now.attempt, Outcome(fault=Fault.CANCELLED, error=why))

    async def _refill(self, source: Source) -> bool:
        """Let a group begin when no rollout waits to be leased. Return whether another group may begin soon.

        Where agents run is not known here, so one group is ahead of them: it begins when the one before was taken.
        """
        if (await self.store.list_rollouts(self.run, status=Status.PENDING, limit=1)).items:
            return True
        return await source.refill()

    async def _check_silence(self) -> None:
        """Log a warning when rollouts have waited for `SILENCE_SECONDS` and nobody runs any."""
        if not self.expected or time.monotonic() - self._silent_since < SILENCE_SECONDS:
            return
        self._silent_since = time.monotonic()
        if (await self.store.list_rollouts(self.run, status=Status.RUNNING, limit=1)).items:
            return
        logger.warning(
            "%s, and no client has taken one for %.0f s. %s",
            counted(len(self.expected), f"rollout of run {self.run} waits", f"rollouts of run {self.run} wait"),
            SILENCE_SECONDS,
            f"Start one where the agents are to run: {self.how_to_join}"
            if self.how_to_join
            else "The runner starts them",
        )
