"""`Client`: leases rollouts from Lightning Servers, runs the agent on them, and reports what came of it.

The invariant: what is leased is reported or given back before `run` returns; a server that is away is waited for, one that
refuses something is asked again. A refused token ends it with an error that says why, and so do named runs that stay refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

from lightning import asyncio_utils
from lightning.asyncio_utils import until_told
from lightning.config import Config, load_config, with_settings
from lightning.errors import ConfigError, UnavailableError
from lightning.plugins import plugins
from lightning.runner.lease_loop import deliver
from lightning.runner.protocol import Agent
from lightning.types import as_texts, new_id

from lightning_server.client.delivery import AttemptCounts, ServerDelivery
from lightning_server.client.run_discovery import Runs
from lightning_server.client.server_presence import Presence, Servers
from lightning_server.http_store import HttpStore

logger = logging.getLogger(__name__)

PATIENCE = 5.0
"""Seconds a single request asks again; the client itself goes on asking without end."""
STARTING_PAUSE = 2.0

__all__ = ["AttemptCounts", "Client"]


def _with_token(config: Config, token: str | Path | None) -> tuple[str, ...] | None:
    """What agents in a sandbox may not read where the token, which leases any rollout, is in a file."""
    if not isinstance(token, Path):
        return None
    return (*config.runner.sandbox_hidden, str(token.absolute()))


class Client:
    """Runs an agent for the servers at `server` (one URL, or several that serve one database).

    `token` (default: the environment's `LIGHTNING_TOKEN`) has the scope `runner`; a path names a file with it, which is read
    again when servers refuse what it had. `runs` are the runs to work for; by default
    every run of the token's project that has work. `runner` names the plugin that executes agents (`process`, `inline`, ...),
    `config` is a `lightning.config.Config` or a TOML file, of which the section `runner` counts; `concurrency` and `adapters`
    win over it. `rollouts` ends the client after so many attempts, `idle` after so many seconds without work.

    Raises `ConfigError` for settings that cannot be meant, `PluginError` for an unknown runner.
    """

    def __init__(
        self,
        server: str | Sequence[str],
        agent: Agent,
        *,
        token: str | Path | None = None,
        runs: Sequence[str] = (),
        runner: str = "process",
        config: Config | str | Path | None = None,
        concurrency: int | None = None,
        adapters: Sequence[str] | None = None,
        rollouts: int | None = None,
        idle: float | None = None,
    ) -> None:
        named = as_texts(runs, "runs")
        base = config if isinstance(config, Config) else load_config(Path(config) if config else None)
        given = {
            "runner.concurrency": concurrency,
            "runner.adapters": as_texts(adapters, "adapters") if adapters is not None else None,
            "runner.sandbox_hidden": _with_token(base, token),
        }
        self.config = with_settings(base, {key: value for key, value in given.items() if value is not None})
        if rollouts is not None and rollouts < 1:
            raise ConfigError(f"rollouts={rollouts} is no work: give a number from 1, or none for no end")
        self._store = HttpStore(server, token=token, patience=PATIENCE)
        self._runner = plugins().runner(runner)(agent, self.config)
        if self._runner.concurrency == 0:
            raise ConfigError(
                f"the runner {runner!r} runs no agents itself: a client needs one that does, such as process"
            )
        self._given = (named, rollouts, idle)

    def run(self) -> AttemptCounts:
        """Work until there is a reason to end: `rollouts` or `idle`, SIGTERM, or Ctrl-C; return what was done.

        SIGTERM and Ctrl-C drain: nothing more is leased, agents get `runner.drain` seconds, then their leases are given back. A
        second one ends everything at once. Raises `StoreError` when servers refuse the token, or leases of all of `runs` for as
        long as a lease lasts, `RunnerError` when no agent can run, and `RuntimeError` where an event loop runs already: await
        `work` there.
        """
        return asyncio_utils.run(self._until_told(), instead="`await client.work()` in place of client.run()")

    async def work(self, stop: asyncio.Event | None = None) -> AttemptCounts:
        """`run` on the loop that there is; set `stop` to drain. Cancelling ends the agents and gives the leases back."""
        runs, rollouts, idle = self._given
        servers = Servers()
        worker = f"{socket.gethostname()}/{os.getpid()}/{new_id('client')}"
        stop = stop or asyncio.Event()
        try:
            await self._runner.start()
            if not await self._open(stop):
                return AttemptCounts()
            presence, ttl = Presence(), self.config.runner.lease_ttl
            delivery = ServerDelivery(
                self._store,
                servers,
                Runs(self._store, runs, math.inf if idle is None else idle, presence, ttl),
                worker,
                ttl,
                rollouts,
                idle,
                presence,
                timeout=self.config.runner.timeout,
            )
            await deliver(delivery, self._runner, self.config.runner, stop=stop)
            return delivery.tally
        finally:
            await self._runner.close()
            await servers.close()
            await self._store.close()

    async def _open(self, stop: asyncio.Event) -> bool:
        """Connect; a client may be started before its server. False when it was told to end before one came."""
        told = False
        while not stop.is_set():
            try:
                await self._store.open()
            except UnavailableError as error:
                if not told:
                    logger.warning("%s. Waiting for one", error)
                    told = True
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), STARTING_PAUSE)
            else:
                return True
        return False

    async def _until_told(self) -> AttemptCounts:
        stop = asyncio.Event()
        return await until_told(self.work(stop), signal.SIGTERM, signal.SIGINT, gently=stop)
