"""`Client`: leases rollouts from Lightning Servers, runs the agent on them, and reports the outcomes.

The invariant: every lease is reported or given back before `run` returns. The client waits for servers that do not answer, and
asks again for what servers refuse. It ends with an error when its token is refused, or when runs named by the user stay
refused.

Agents go on while no server answers. Leases wait, renewals are missed, and an outcome is sent again until a server takes it or
says that the attempt was given to another client. A shorter form of it is sent only when servers refuse it for its content or
length, or have refused it for as long as a lease lasts while they answered other requests. A refusal about one attempt costs
that attempt alone.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

import jwt
from lightning import asyncio_utils
from lightning.asyncio_utils import is_set_within, unless, until_told
from lightning.bounded import Once
from lightning.config import Config, load_config, with_settings
from lightning.errors import ConfigError, DataError, LightningError, StaleAttemptError, UnavailableError
from lightning.plugins import plugins
from lightning.runner.lease_loop import deliver
from lightning.runner.outcomes import encode_outcome, failed, without_arguments
from lightning.runner.protocol import Agent
from lightning.safe_text import counted
from lightning.store.protocol import RunWatch
from lightning.types import LLM, Fault, Lease, Outcome, Rollout, Status, as_texts, new_id

from lightning_server.client.run_discovery import Runs
from lightning_server.client.server_presence import Presence, Servers
from lightning_server.http_store import HttpStore
from lightning_server.http_store.transport import PageError, TokenRefusedError, TooLongError

logger = logging.getLogger(__name__)

PATIENCE = 5.0
"""Seconds for which a single request is repeated; the client itself goes on without end."""
STARTING_PAUSE = 2.0


class Client:
    """Runs an agent for the servers at `server` (one URL, or several that serve one database).

    `token` has the scope `runner` (default: the environment's `LIGHTNING_TOKEN`). A path names a file with the token, which is
    read again when servers refuse the token. `runs` are the runs to work for (default: every run of the token's project that
    has work). `runner` names the plugin that executes agents (`process`, `inline`, ...). `config` is a
    `lightning.config.Config` or a TOML file; only its section `runner` is used, and `concurrency` and `adapters` override it.
    The client ends after `rollouts` attempts, or after `idle` seconds without work.

    Raises `ConfigError` for impossible settings, `PluginError` for an unknown runner.
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
        given: dict[str, object] = {
            "runner.concurrency": concurrency,
            "runner.adapters": as_texts(adapters, "adapters") if adapters is not None else None,
        }
        if isinstance(token, Path):  # agents do not see the file, since its token leases any rollout
            given["runner.sandbox_hidden"] = (*base.runner.sandbox_hidden, str(token.absolute()))
        self.config = with_settings(base, {key: value for key, value in given.items() if value is not None})
        if rollouts is not None and rollouts < 1:
            raise ConfigError(f"rollouts={rollouts} must be at least 1; leave it out to work without an end")
        self._store = HttpStore(server, token=token, patience=PATIENCE)
        self._runner = plugins().runner(runner)(agent, self.config)
        if self._runner.concurrency == 0:
            raise ConfigError(
                f"the runner {runner!r} runs no agents itself: a client needs one that does, such as process"
            )
        self._given = (named, rollouts, idle)

    def run(self) -> AttemptCounts:
        """Work until `rollouts` or `idle`, SIGTERM or Ctrl-C ends it; return what was done.

        SIGTERM and Ctrl-C drain: nothing more is leased, agents get `runner.drain` seconds, then their leases are given back. A
        second signal ends everything at once. Raises `StoreError` when servers refuse the token, or refuse leases of all `runs`
        for as long as a lease lasts; `RunnerError` when no agent can run; `RuntimeError` inside a running event loop: await
        `work` there.
        """
        return asyncio_utils.run(self._until_told(), instead="`await client.work()` in place of client.run()")

    async def work(self, stop: asyncio.Event | None = None) -> AttemptCounts:
        """Do as `run` does, on the running event loop; set `stop` to drain. Cancelling ends the agents and gives the leases
        back."""
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
                stop=stop,
            )
            news = asyncio.Event()
            await unless(
                deliver(delivery, self._runner, self.config.runner, news=news), self._drain_over(delivery, news)
            )
            return delivery.tally
        finally:
            await self._runner.close()
            await servers.close()
            await self._store.close()

    async def _drain_over(self, delivery: ServerDelivery, news: asyncio.Event) -> None:
        """Return when agents have had `runner.drain` seconds to end since the delivery was stopped. Set `news` when it is."""
        await delivery.stop.wait()
        news.set()
        seconds = self.config.runner.drain
        logger.info(
            "stopping: %s %g s to end (runner.drain)", counted(delivery.running, "agent gets", "agents get"), seconds
        )
        await asyncio.sleep(seconds)
        if running := delivery.running:
            logger.warning("%s ended after %g s (runner.drain)", counted(running, "agent was", "agents were"), seconds)

    async def _open(self, stop: asyncio.Event) -> bool:
        """Connect to a server, and wait until one answers. Returns False when `stop` was set before."""
        told = Once()
        while not stop.is_set():
            try:
                await self._store.open()
            except UnavailableError as error:
                if told.first():
                    logger.warning("%s. Waiting for one", error)
                await is_set_within(stop, STARTING_PAUSE)
            else:
                return True
        return False

    async def _until_told(self) -> AttemptCounts:
        stop = asyncio.Event()
        return await until_told(self.work(stop), signal.SIGTERM, signal.SIGINT, gently=stop)


FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0
"""The first and the longest pause in seconds between two attempts to send an outcome."""
LONG_ENOUGH = 0.95
"""A key must be valid for this part of `runner.timeout`, not all of it: it was issued a moment ago, by a machine with another
clock."""
WORK = "leases and outcomes"
"""The kind of request that a delivery makes, for `Presence`."""


@dataclass(slots=True)
class AttemptCounts:
    """What a client has done: attempts it leased, and how they ended. `retried` attempts are to be made again; `lost` ones were
    given to other clients, or no server took their outcome."""

    leased: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    retried: int = 0
    lost: int = 0


@dataclass(slots=True)
class ServerDelivery:
    """Leases attempts from servers and reports their outcomes, for the loop that runs agents. It leases `rollouts` attempts at
    most, and ends after `idle` seconds without work.

    `ttl` is how long a lease lasts, `timeout` how long an agent may run, both in seconds. Once `stop` is set nothing more is
    leased.
    """

    store: HttpStore
    servers: Servers
    runs: Runs
    worker: str
    ttl: float
    rollouts: int | None = None
    idle: float | None = None
    presence: Presence = field(default_factory=Presence)
    timeout: float = 0.0
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    tally: AttemptCounts = field(default_factory=AttemptCounts)
    _used: dict[tuple[str, int], tuple[str, str]] = field(default_factory=dict)  # of an attempt: its server, process
    _busy_at: float = field(default_factory=time.monotonic)
    _told_of_keys: Once = field(default_factory=Once)
    _asked: bool = False  # since the first request there may be leases, even if no answer came

    def watch(self) -> AbstractAsyncContextManager[RunWatch]:
        """Watch for runs that may have become leasable, for the length of the block."""
        return self.runs.watching()

    @property
    def running(self) -> int:
        """The number of leased attempts whose outcomes no server has taken yet."""
        return len(self._used)

    async def lease(self, limit: int) -> list[tuple[Lease, LLM]]:
        """Lease up to `limit` attempts; none while no server answers, or servers refuse, and none when `stop` comes first.
        Attempts leased after that are given back in the end."""
        return [] if self.stop.is_set() else await unless(self._lease(limit), self.stop.wait()) or []

    async def _lease(self, limit: int) -> list[tuple[Lease, LLM]]:
        if self.rollouts is not None:
            limit = min(limit, self.rollouts - self.tally.leased)
        found: list[tuple[Lease, LLM]] = []
        self._asked = True
        for run in self.runs.in_turn():
            if len(found) >= limit:
                break
            try:
                leased, over = await self.store.lease_for_agents(
                    run, self.worker, limit=limit - len(found), ttl=self.ttl
                )
            except UnavailableError as error:
                self.presence.away(WORK, error)
                self.runs.unanswered()
                break
            except TokenRefusedError:
                raise
            except LightningError as error:
                self.runs.drop(run, error)
                continue
            self.presence.back(WORK)
            self.runs.answered(run, over)
            if leased:
                self.runs.gave_work(run)
                found += await self._at_server(leased)
        if found:
            self.tally.leased += len(found)
            self._busy_at = time.monotonic()
        return found

    async def renew(self, lease: Lease) -> None:
        """Prolong a lease. While no server answers, or one refuses, the agent goes on. Raises `StaleAttemptError` when the
        attempt was superseded or has ended."""
        try:
            await self.store.renew(lease, ttl=self.ttl)
        except UnavailableError as error:
            self.presence.away(WORK, error)
        except StaleAttemptError:
            self._used.pop((lease.rollout.id, lease.attempt), None)
            raise
        except TokenRefusedError:
            raise
        except LightningError as error:
            logger.warning("%s: its lease was not prolonged, and its agent goes on: %s", _named(lease), error)
        else:
            self.presence.back(WORK)

    async def report(self, lease: Lease, outcome: Outcome) -> Rollout | None:
        """Report an outcome until a server takes it, however long that lasts, and return the rollout; None when servers refuse
        even its shortest form. Raises `StaleAttemptError` when the attempt was superseded."""
        outcome = await self._fair(lease, outcome)
        try:
            rollout = await self._tell(lease, outcome)
        except StaleAttemptError:
            self.tally.lost += 1
            raise
        finally:
            self._used.pop((lease.rollout.id, lease.attempt), None)
        self._busy_at = time.monotonic()
        if rollout is None:
            self.tally.lost += 1
            return None
        self.tally.succeeded += rollout.status is Status.SUCCEEDED
        self.tally.failed += rollout.status is Status.FAILED
        self.tally.cancelled += rollout.status is Status.CANCELLED
        self.tally.retried += rollout.status is Status.PENDING
        return rollout

    async def release(self) -> None:
        """Give back all leases. When no server answers, they expire."""
        if not self._asked:
            return
        try:
            await self.store.release(self.worker)
        except UnavailableError as error:
            logger.warning("leases were not given back and will expire: %s", error)

    async def unfinished(self) -> bool:
        """Whether there may be more to do: False once `stop` is set, after `rollouts` attempts, after `idle` seconds without
        work, or when all given runs are over."""
        if self.stop.is_set() or (self.rollouts is not None and self.tally.leased >= self.rollouts):
            return False
        if self.runs.are_over:
            logger.warning("the runs that this client was started for are over: it ends")
            return False
        return self.idle is None or time.monotonic() - self._busy_at < self.idle

    # inside -----------------------------------------------------------------------------------------------------
    async def _at_server(self, leased: list[tuple[Lease, LLM]]) -> list[tuple[Lease, LLM]]:
        """Return the leases with the model's address at the server that has just answered, because that address is known to
        work from here."""
        url = self.store.answering
        process = await self.servers.process_at(url)
        for lease, llm in leased:
            self._used[lease.rollout.id, lease.attempt] = (url, process)
            self._check_lifetime(llm, url)
        return [(lease, replace(llm, base_url=f"{url}/v1")) for lease, llm in leased]

    def _check_lifetime(self, llm: LLM, url: str) -> None:
        """Warn once when agents may run longer than their keys are valid: the server does not know this client's settings."""
        left = seconds_left(llm.api_key)
        if left >= LONG_ENOUGH * self.timeout or not self._told_of_keys.first():
            return
        logger.warning(
            "runner.timeout is %g s and the server at %s gives agents keys for %.0f s (by this machine's clock): the attempt "
            "of one that runs longer fails. Raise gateway.token_ttl of the server, or lower runner.timeout",
            self.timeout,
            url,
            max(0.0, left),
        )

    async def _tell(self, lease: Lease, outcome: Outcome) -> Rollout | None:
        """Send an outcome, in shorter forms as long as servers refuse it, at last as a fault. Return the rollout, or None when
        servers refuse all forms."""
        refused: LightningError | None = None
        for told in _less_and_less(outcome):
            taken = await self._try_to_tell(lease, told)
            if isinstance(taken, Rollout):
                return taken
            refused = taken
            logger.warning("%s: its outcome is refused, less of it is told now: %s", _named(lease), refused)
        fault = failed(Fault.INFRASTRUCTURE, _why(outcome, refused), seconds=outcome.seconds)
        taken = await self._try_to_tell(lease, fault)
        if isinstance(taken, Rollout):
            return taken
        logger.error("%s is lost, its lease runs out: servers take no word of how it ended: %s", _named(lease), taken)
        return None

    async def _try_to_tell(self, lease: Lease, outcome: Outcome) -> Rollout | LightningError:
        """Send one form of an outcome until a server answers. Return the rollout, or the error with which it was refused.

        A refusal for another reason than the outcome's content may pass, and so may a proxy's error page while servers answer
        other requests. The outcome is then sent again until the pauses after such refusals add up to `ttl` seconds.
        """
        pause, left = FIRST_PAUSE, self.ttl
        while True:
            wait = pause * random.uniform(0.5, 1.0)  # noqa: S311 — so that clients do not come back as one
            try:
                rollout = await self.store.complete(lease.rollout.id, lease.attempt, outcome)
            except (StaleAttemptError, TokenRefusedError):
                raise
            except LightningError as error:
                if isinstance(error, UnavailableError) and not (isinstance(error, PageError) and await self._answers()):
                    self.presence.away(WORK, error)
                else:
                    if isinstance(error, DataError) or left <= 0:
                        return error
                    if left == self.ttl:
                        logger.warning(
                            "%s: its outcome is refused, and told again for %g s: %s", _named(lease), left, error
                        )
                    wait = min(wait, left)
                    left -= wait
            else:
                self.presence.back(WORK)
                return rollout
            await asyncio.sleep(wait)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _answers(self) -> bool:
        """Whether a server answers a request that has no outcome in it. If an error page answers that request too, the page is
        not about the outcome."""
        try:
            await self.store.version()
        except UnavailableError:
            return False
        except TokenRefusedError:
            raise
        except LightningError as error:
            logger.debug("servers answer, though not which release they are of: %s", error)
        return True

    async def _fair(self, lease: Lease, outcome: Outcome) -> Outcome:
        """Turn an agent's fault into one of the infrastructure, so that the attempt may be made again, if the agent's server is
        gone. Other outcomes are returned unchanged."""
        url, process = self._used.get((lease.rollout.id, lease.attempt), ("", ""))
        if outcome.fault not in (Fault.AGENT, Fault.POLICY, Fault.TIMEOUT):
            return outcome
        if not await self.servers.is_gone(url, process):
            return outcome
        message = f"the server at {url} went away while the agent ran, then the agent failed: {outcome.error}"
        return replace(outcome, fault=Fault.INFRASTRUCTURE, error=message)


def seconds_left(token: str) -> float:
    """Return the seconds until a key expires by this machine's clock, without checking its signature; infinity for a key that
    has no expiry."""
    try:
        said = jwt.decode(token, options={"verify_signature": False})
        return float(said["exp"]) - time.time()
    except (jwt.InvalidTokenError, KeyError, ValueError, TypeError):
        return math.inf


def _less_and_less(outcome: Outcome) -> list[Outcome]:
    """Return an outcome and its shorter forms: without the arguments of its tool events, then without tool events. All have the
    reward or fault, step rewards and labels."""
    told = [outcome]
    for less in (without_arguments(outcome), replace(outcome, tool_events=())):
        if less != told[-1]:
            told.append(less)
    return told


def _why(outcome: Outcome, refused: LightningError | None) -> str:
    """Return the error text for an outcome that servers refuse in every form; `refused` is what they said of the shortest."""
    if not isinstance(refused, TooLongError):
        return f"servers refused the outcome, also without what its tools did: {refused}"
    return (
        f"the outcome is too long, of {len(encode_outcome(outcome))} bytes, also without what its tools did; let the agent "
        f"report less, or do what its refusal says: {refused}"
    )


def _named(lease: Lease) -> str:
    return f"rollout {lease.rollout.id}, attempt {lease.attempt}"
