"""The runner `ray`: agents run in actors of a Ray cluster, wherever Ray finds room for them.

The invariant: when an actor dies or does not answer, each rollout in it loses one attempt, as a fault of the infrastructure,
and the actor is replaced. A place in an actor is used again only when its agent is known to have ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import lightning
from lightning.addresses import leads_to_itself
from lightning.asyncio_utils import cancel
from lightning.config import RunnerConfig
from lightning.errors import RunnerError
from lightning.runner.agent_serialization import pack_agent
from lightning.runner.outcomes import decode_outcome, encode_request, failed
from lightning.runner.protocol import Agent
from lightning.types import LLM, Fault, Lease, Outcome

from lightning_ray.cluster import ActorLostError, RayCluster, Reference, actors_for, connect
from lightning_ray.config import RayConfig

logger = logging.getLogger(__name__)

GRACE = 30.0
"""Seconds beyond `runner.timeout` after which an actor that has not answered counts as dead: it ends its agents itself."""
CANCEL_SECONDS = 10.0
"""Seconds that an actor gets to end the agent of a cancelled rollout."""
MAX_FAILED_STARTS = 5
"""How many actors may die in a row while they start, when none runs, before the runner fails."""
LONGEST_PAUSE = 60.0
"""The longest pause in seconds between tries to replace an actor."""


@dataclass(slots=True, eq=False)
class _Host:
    """One actor. It is `lost` when it must not be used any more."""

    actor: Any
    ready: bool = False
    lost: bool = False


class RayRunner:
    """Runs `runner.concurrency` agents in actors, `runner.ray.agents_per_actor` in each.

    An agent runs in its own process beside its actor, and its crashes, hangs and output are treated as by the process runner.
    docs/runners.md says what the nodes need. Raises `RunnerError` for an agent that cannot be sent.
    """

    def __init__(self, agent: Agent, config: RunnerConfig) -> None:
        self._config = config
        self.concurrency = config.concurrency
        self._shipped = pack_agent(agent)
        self._cluster: RayCluster | None = None
        self._places: asyncio.Queue[_Host | None] = asyncio.Queue()
        self._broken: RunnerError | None = None
        self._hosts: set[_Host] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed_starts = 0
        self._many_machines = False

    async def start(self) -> None:
        """Connect, ask for all actors, and wait for the first one. Raises `RunnerError` when no actor can start. Idempotent."""
        if self._cluster is not None:
            return
        self._cluster = await connect(self._config)
        self._places, self._broken, self._failed_starts = asyncio.Queue(), None, 0
        try:
            for _ in range(actors_for(self._config)):
                self._spawn(self._new_host(self._cluster))
            self._places.put_nowait(await self._place())
        except BaseException:
            await self.close()
            raise

    async def run(self, lease: Lease, llm: LLM) -> Outcome:
        """Run the agent on the leased task. Cancelling this kills the agent.

        Raises `RunnerError` when no more actors can be started, or when agents could not reach the model.
        """
        cluster = self._cluster
        if cluster is None:
            raise RunnerError("the Ray runner has not been started: await runner.start() first")
        if self._many_machines and leads_to_itself(llm.base_url):
            raise RunnerError(
                f"agents on other nodes of the Ray cluster cannot reach the model at {llm.base_url}: set gateway.host "
                "(server.host, where server.port is set) to the address of this machine that the nodes reach"
            )
        host = await self._place()
        started = time.monotonic()
        reference: Reference = host.actor.run.remote(encode_request(lease.rollout.task, llm))
        limit = self._config.timeout + GRACE
        try:
            reply = await cluster.answer(reference, limit)
        except (ActorLostError, TimeoutError) as error:
            self._lose(cluster, host)
            said = str(error) or f"it did not answer in {limit:g} s"
            text = f"the actor that ran the agent was lost: {said}"
            return failed(Fault.INFRASTRUCTURE, text, seconds=time.monotonic() - started)
        except asyncio.CancelledError:
            self._spawn(self._end_agent(cluster, host, reference))
            raise
        self._places.put_nowait(host)
        try:
            return decode_outcome(reply)
        except ValueError as error:
            text = f"what the agent reported cannot be used: {error}"
            return failed(Fault.AGENT, text, seconds=time.monotonic() - started)

    async def close(self) -> None:
        """Kill all actors, and disconnect. Idempotent; `start` may follow."""
        cluster, self._cluster = self._cluster, None
        await cancel(*self._tasks)
        if cluster is not None:
            for host in tuple(self._hosts):
                self._discard(cluster, host)
            await cluster.close()

    async def _place(self) -> _Host:
        """Wait for a place for one agent, and return its actor. Raises `RunnerError` when there will be none."""
        while True:
            host = await self._places.get()
            if host is None:
                self._places.put_nowait(None)  # for the others who wait
                raise self._broken or RunnerError("the Ray runner was closed")
            if not host.lost:
                return host

    async def _new_host(self, cluster: RayCluster) -> None:
        """Start an actor, with repeated tries, and open its places when it is ready."""
        pause = 1.0
        while not await self._started(cluster):
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _started(self, cluster: RayCluster) -> bool:
        """Try to start an actor, and return whether it runs."""
        host = _Host(cluster.host(self._shipped))
        self._hosts.add(host)
        reference: Reference = host.actor.start.remote(lightning.__version__)
        while True:
            try:
                wrong = await cluster.answer(reference, RayConfig.of(self._config).start_timeout)
            except TimeoutError:
                self._start_failed(self._no_room(), hopeless=True)
                continue  # Ray goes on looking for room
            except ActorLostError as error:
                self._discard(cluster, host)
                self._failed_starts += 1
                text = f"an actor could not be started: {error}"
                self._start_failed(text, hopeless=self._failed_starts >= MAX_FAILED_STARTS)
                return False
            if wrong:
                self._discard(cluster, host)
                self._start_failed(wrong, hopeless=True)
                return False
            break
        self._many_machines = await asyncio.to_thread(cluster.spans_machines)
        host.ready, self._failed_starts = True, 0
        for _ in range(RayConfig.of(self._config).agents_per_actor):
            self._places.put_nowait(host)
        return True

    def _no_room(self) -> str:
        settings = RayConfig.of(self._config)
        return (
            f"Ray has had no room for an actor for {settings.start_timeout:g} s (runner.ray.start_timeout): it needs num_cpus "
            f"{settings.num_cpus:g}, num_gpus {settings.num_gpus:g}, resources {settings.resources}. Add nodes, or lower "
            "runner.ray.num_cpus or runner.concurrency"
        )

    def _start_failed(self, wrong: str, *, hopeless: bool) -> None:
        """Log a failed start. If it is `hopeless` and no actor runs, end all waiting for places with an error."""
        if hopeless and not any(host.ready for host in self._hosts):
            self._break(RunnerError(f"no agent can be run in the Ray cluster: {wrong}"))
        else:
            logger.warning("%s", wrong)

    def _break(self, error: RunnerError) -> None:
        if self._broken is None:
            self._broken = error
            self._places.put_nowait(None)

    async def _end_agent(self, cluster: RayCluster, host: _Host, reference: Reference) -> None:
        """Free a place when the agent in it was killed; replace the actor if it does not kill the agent in time."""
        cluster.cancel(reference)
        try:
            await cluster.answer(reference, CANCEL_SECONDS)
        except TimeoutError:
            self._lose(cluster, host)
            return
        except ActorLostError as error:
            logger.debug("an agent was ended: %s", error)  # if the actor itself has ended, its next use fails
        self._places.put_nowait(host)

    def _lose(self, cluster: RayCluster, host: _Host) -> None:
        """Replace an actor, unless it is already lost."""
        if not host.lost:
            self._discard(cluster, host)
            if self._cluster is not None:
                self._spawn(self._new_host(cluster))

    def _discard(self, cluster: RayCluster, host: _Host) -> None:
        host.lost = True
        self._hosts.discard(host)
        cluster.kill(host.actor)

    def _spawn(self, doing: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(doing)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """End all waiting for places when Ray refused to make an actor, for example for an impossible option."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._break(RunnerError(f"Ray refused to make an actor: {error}. Check the settings runner.ray"))
