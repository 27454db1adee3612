"""Runs a run's rollouts to their end: by the trainer's own runner, by clients elsewhere, or by both at once.

The invariant: each rollout that ends for good while this process waits for it is told once (to the caller and to the hook
`rollout_finished`), wherever its agent ran; what was lost on its last attempt ends although nobody leases any more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from lightning.config import Config, RunnerConfig
from lightning.errors import ConfigError
from lightning.gateway.stages import Line
from lightning.plugins import plugins
from lightning.runner.lease_loop import Source, work
from lightning.runner.protocol import Agent, Runner
from lightning.store.protocol import Store
from lightning.store.url import parse
from lightning.trainer.training_data import all_rollouts
from lightning.types import LLM, Lease, Rollout, Status

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""How often the store is asked without news: an expired lease is none."""
SETTLE_SECONDS = 0.2
"""News of so long are looked at together: with a hundred clients there is always some."""
ROOM_SECONDS = 0.25
"""How often to see whether clients have taken what waits, while more groups may begin."""
SILENCE_SECONDS = 30.0
"""How long rollouts wait for a client until that is said, and then again and again."""


def hidden_from_agents(config: Config, out: Path, url: str) -> Config:
    """The settings, where agents in a sandbox see neither the run's folder nor that of its SQLite store. It may be the
    runner's sandbox, or one that an agent makes for its program."""
    runner = config.runner
    secret = [out.resolve()]
    where = parse(url)
    if where.scheme == "sqlite":
        secret.append(Path(where.path).resolve().parent)
    hidden = tuple(dict.fromkeys((*runner.sandbox_hidden, *map(str, secret))))
    return config.model_copy(update={"runner": runner.model_copy(update={"sandbox_hidden": hidden})})


def runner_here(name: str, agent: Agent, config: Config, out: Path, url: str) -> Runner:
    """The runner of a name, which runs the agent on this machine and hides the run's folder and store from it. Raises
    `ConfigError` for one whose agents run elsewhere."""
    runner = plugins().runner(name)(agent, hidden_from_agents(config, out, url))
    if runner.concurrency == 0:
        raise ConfigError(f"runner {name!r} runs no agents here, and this needs that: use process or inline")
    return runner


class Agents:
    """The agents of one run. A `runner` whose `concurrency` is 0 runs none in this process: clients do.

    The stages of `line`, the gateway's, are asked of the outcomes of its own runner. `how_to_join` is the command that starts a
    client (empty: the runner does), told when nobody takes what waits. With `shared` clients are expected beside the runner of
    this process.
    """

    def __init__(
        self, store: Store, run: str, runner: Runner, config: RunnerConfig, llm_for: Callable[[Lease], LLM], line: Line
    ) -> None:
        self._store, self._run, self._runner, self._config = store, run, runner, config
        self._llm_for, self._line = llm_for, line
        self._open: dict[str, Rollout] = {}
        self._told: Callable[[Rollout], None] = lambda rollout: None
        self._silent_since = time.monotonic()
        self.how_to_join = "lightning runner"
        self.shared = False

    @property
    def elsewhere(self) -> bool:
        """Whether all agents run in clients."""
        return self._runner.concurrency == 0

    def expect(self, rollouts: Iterable[Rollout]) -> None:
        """Tell of the end of these, which have not ended as far as is known."""
        self._open |= {rollout.id: rollout for rollout in rollouts}

    async def forget_ended(self, among: Sequence[Rollout]) -> None:
        """Do not tell of those among these that have ended already: they did before this process."""
        for rollout in await self._ended(among):
            self._open.pop(rollout.id, None)

    async def work(self, told: Callable[[Rollout], None], source: Source | None = None) -> None:
        """Return when every expected rollout has ended; with a `source`, ask it for more and go on until cancelled."""
        self._told = told
        if self.elsewhere:
            await self._attend(source)
            return
        elsewhere = asyncio.create_task(self._look_beside())
        try:
            await work(
                self._store,
                self._runner,
                self._run,
                self._llm_for,
                worker=f"{self._run}/local",
                config=self._config,
                line=self._line,
                on_finished=self._tell,
                source=source,
            )
        finally:
            elsewhere.cancel()
            with suppress(asyncio.CancelledError):
                await elsewhere
        await self._look()

    async def _look_beside(self) -> None:
        """Clients may end rollouts, too: of this run's server, or of any other over the store."""
        if not self.shared:
            while True:
                await asyncio.sleep(LOOK_SECONDS)
                await self._look()
        async with self._store.watch(self._run) as watch:
            while True:
                await self._look()
                await watch.wait(LOOK_SECONDS)
                await asyncio.sleep(SETTLE_SECONDS)

    async def _attend(self, source: Source | None) -> None:
        """Wait for what clients do."""
        self._silent_since = time.monotonic()
        async with self._store.watch(self._run) as watch:
            while True:
                await self._store.lease(self._run, f"{self._run}/trainer", limit=0)  # ends what no attempt is left for
                await self._look()
                if source is None and not self._open:
                    return
                more = source is not None and await self._refill(source)
                await self._check_silence()
                wait = ROOM_SECONDS if more else LOOK_SECONDS
                if source is None:
                    await watch.wait(wait)
                else:
                    await _first(watch.wait(wait), source.changed.wait())
                    source.changed.clear()
                await asyncio.sleep(SETTLE_SECONDS)

    async def _refill(self, source: Source) -> bool:
        """Let a group begin when none waits to be leased; whether another one may follow soon.

        Where agents run is not known here, so one group is ahead of them: it begins when the one before was taken.
        """
        if (await self._store.list_rollouts(self._run, status=Status.PENDING, limit=1)).items:
            return True
        return await source.refill()

    async def _look(self) -> None:
        for rollout in await self._ended(list(self._open.values())):
            self._tell(rollout)

    async def _ended(self, among: Sequence[Rollout]) -> list[Rollout]:
        """Those of these rollouts that have ended."""
        found, ids = [], {rollout.id for rollout in among}
        for split, step in {(rollout.split, rollout.step) for rollout in among}:
            found += await all_rollouts(self._store, self._run, split=split, step=step)
        return [rollout for rollout in found if rollout.status.ended and rollout.id in ids]

    def _tell(self, rollout: Rollout) -> None:
        self._silent_since = time.monotonic()
        if self._open.pop(rollout.id, None) is not None:
            plugins().hook.rollout_finished(rollout=rollout)
            self._told(rollout)

    async def _check_silence(self) -> None:
        """Say it when rollouts wait and nobody runs any."""
        if not self._open or time.monotonic() - self._silent_since < SILENCE_SECONDS:
            return
        self._silent_since = time.monotonic()
        if (await self._store.list_rollouts(self._run, status=Status.RUNNING, limit=1)).items:
            return
        logger.warning(
            "%d rollouts of run %s wait, and no client has taken one for %.0f s. %s",
            len(self._open),
            self._run,
            SILENCE_SECONDS,
            f"Start one where the agents are to run: {self.how_to_join}"
            if self.how_to_join
            else "The runner starts them",
        )


async def _first(*things: Coroutine[object, object, object]) -> None:
    """Return when one of them has come; errors come through, the others are cancelled."""
    tasks = [asyncio.create_task(thing) for thing in things]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
