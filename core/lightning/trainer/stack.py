"""The running parts of a training run: store, policy server, gateway, runner; opened together, closed in reverse.

The invariant: whatever fails while opening or running, everything that was started is stopped, and nothing acknowledged
is lost. No call is answered with weights that are not those of the run's last step.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning.asyncio_utils import all_of, cancel, unless
from lightning.config import Config
from lightning.config.sections import GatewayConfig, PolicyServerConfig
from lightning.errors import PolicyServerError
from lightning.gateway import Gateway, Upstream
from lightning.gateway.connections import bind
from lightning.gateway.identity import gateway_secret
from lightning.gateway.policy import RESTARTING, UNKNOWN, owner_of
from lightning.gateway.stages import Line
from lightning.policy_server.auto_settings import Demand, shares_gpu
from lightning.policy_server.policies import ServedModel
from lightning.policy_server.protocol import PolicyServer, Probe, Update
from lightning.policy_server.servers import check_servers, log_of_server, served_models, settings_of_servers
from lightning.policy_server.vllm_server import make_policy_server, reserved_port
from lightning.policy_server.weights import WeightsFolder
from lightning.runner.lease_loop import Source
from lightning.runner.protocol import Runner
from lightning.store.memory import MemoryStore
from lightning.store.protocol import Store
from lightning.store.rollout_state import EXCUSED
from lightning.trainer.agents import (
    Agents,
    ClientDoor,
    GatewayProcesses,
    HowToCall,
    check_exposure,
    door_for,
    gateways_for,
    of_project,
)
from lightning.trainer.run_stages import Prompts
from lightning.types import LLM, Lease, Rollout, Run

logger = logging.getLogger(__name__)

MAX_RESTARTS = 5
"""A policy server that dies more often than this within one step has a fault of its own, unless one rollout may have ended it
each time: that one comes to its end first."""


NOTICE_SECONDS = 5
"""How long a failed update waits to hear that the policy server has died."""
BACK_SECONDS = 0.1
"""Seconds between two looks whether every server is back."""


@dataclass(slots=True, eq=False)
class Served:
    """One of the policy's servers. Gateways know it as `upstream`. While it is `away`, it is started again and gets no calls.
    `refused` is set when it has not taken weights that others took, so that it must be started again. `deaths` counts its
    deaths since the last step."""

    server: PolicyServer
    upstream: Upstream
    away: bool = False
    deaths: int = 0
    refused: asyncio.Event = field(default_factory=asyncio.Event)

    async def gone(self) -> None:
        """Return when the server must be started again."""
        await unless(self.server.wait_died(), self.refused.wait())
        self.refused.clear()


@dataclass
class Stack:
    """What the loop works with. Make one with `open_stack`. Until the first update `waiting` may hold calls.

    `servers` are the policy's, each with the weights of `version` unless it is started again; `weights` is the file of these
    weights (None: the model folder's). `restarts` counts servers that were started again. `store` is as the run's project sees
    it, with the project's own names for resources.
    """

    run: Run
    config: Config
    folder: Path
    store: Store
    servers: Sequence[PolicyServer]
    gateway: Gateway
    runner: Runner
    weights_folder: WeightsFolder
    prompts: Prompts = field(default_factory=Prompts)
    version: int = 0
    weights: Path | None = None
    restarts: int = 0
    waiting: AsyncExitStack = field(default_factory=AsyncExitStack, repr=False)
    gateways: GatewayProcesses | None = None
    _supervisor: asyncio.Task[object] | None = field(default=None, repr=False)
    _serving: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    """Set while at least one server may get calls."""
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)
    """Held while servers get new weights, and while one that was away comes back."""

    def __post_init__(self) -> None:
        self._served = [Served(server, upstream_of(server)) for server in self.servers]
        self._serving.set()
        self.owner = owner_of(self.store, self.run.id, seed_of(self.config))
        self.agents = Agents(
            self.store, self.run.id, self.runner, self.config.runner, self.llm, self.gateway.parts.line
        )

    def llm(self, lease: Lease) -> LLM:
        """The model as one attempt sees it; evaluations may fix the temperature."""
        return self._how.llm(self.gateway, lease, self.prompts.of(lease.rollout))

    async def create(self, rollouts: Sequence[Rollout]) -> None:
        """Create rollouts (again, harmlessly, after a resume) that run with the run's prompts."""
        await self.agents.create(await self.prompts.stamp(self.store, rollouts))

    async def execute(self, rollouts: list[Rollout], on_finished: Callable[[Rollout], None]) -> None:
        """Create the rollouts (again, harmlessly, after a resume) and run every unfinished one to its end."""
        await self.create(rollouts)
        await self._unless_supervisor_fails(asyncio.create_task(self.agents.work(on_finished)))

    async def sample(self, source: Source, on_finished: Callable[[Rollout], None]) -> None:
        """Run rollouts, and ask the source for more, until it is cancelled."""
        await self._unless_supervisor_fails(asyncio.create_task(self.agents.work(on_finished, source)))

    async def update(self, weights: Path | None, version: int, probes: Sequence[Probe] = ()) -> list[Update]:
        """Put new weights into the policy servers, and return the update of each. None: those they have are `version` now.

        Requests that arrive meanwhile wait: for all servers at once, or, where training on older tokens is allowed
        (`trainer.max_staleness`), for one server after another, while the others go on. A server that does not take what
        another one takes is started again with it. Raises `PolicyServerError` if no server takes it.
        """
        restarts = self.restarts
        try:
            updates = await self._update(weights, version, probes)
        except PolicyServerError:
            if not await self._recovered(restarts):
                raise
            updates = await self._update(weights, version, probes)
        self.advanced()
        await self.waiting.aclose()
        return updates

    @asynccontextmanager
    async def resting(self) -> AsyncIterator[None]:
        """For the length of the block the policy server's GPU is the trainer's, where both have the same and take turns: vLLM
        gives back what it has there, and calls wait."""
        if self.config.trainer.max_staleness or not shares_gpu(self.config):
            yield
            return
        async with self.gateway.hold():
            restarts = await self._until_complete()
            try:
                await all_of([server.sleep() for server in self.servers])
            except PolicyServerError:
                if not await self._recovered(restarts):
                    raise
                restarts = await self._until_complete()
                await all_of([server.sleep() for server in self.servers])
            try:
                yield
            finally:
                try:
                    await all_of([server.wake() for server in self.servers])
                except PolicyServerError:
                    if not await self._recovered(restarts):
                        raise

    async def _until_complete(self) -> int:
        """Wait until no server is started again. Return `restarts`."""
        while not self.complete:
            await self._unless_supervisor_fails(asyncio.create_task(asyncio.sleep(BACK_SECONDS)))
        return self.restarts

    def advanced(self) -> None:
        """A step was taken. The policy servers work, so that deaths before it are no reason to end a run of weeks."""
        for each in self._served:
            each.deaths = 0

    async def _update(self, weights: Path | None, version: int, probes: Sequence[Probe] = ()) -> list[Update]:
        """Update every server that is not away. Those that are away get the weights when they come back."""
        while True:
            await self._unless_supervisor_fails(asyncio.create_task(self._serving.wait()))
            async with self._changing:
                there = [each for each in self._served if not each.away]
                if there and (updates := await self._update_all(there, weights, version, probes)):
                    return updates

    async def _update_all(
        self, there: list[Served], weights: Path | None, version: int, probes: Sequence[Probe]
    ) -> list[Update]:
        """Update servers, in one hold or one after another. Return the updates; none if all servers have died meanwhile."""
        alone = self.config.trainer.max_staleness > 0 and weights is not None and len(self._served) > 1
        updates: list[Update] = []
        failed: dict[Served, PolicyServerError] = {}
        for batch in [[each] for each in there] if alone else [there]:
            taken, refused = await self._update_some(
                batch, batch[0].upstream if alone else None, weights, version, probes
            )
            updates += taken
            failed |= refused
        if not updates and failed:
            raise next(iter(failed.values()))
        if not updates:
            return []
        self.version, self.weights = version, weights or self.weights
        for each, error in failed.items():
            logger.warning("the policy server at %s is started again: %s", each.upstream.url, error)
            each.refused.set()
        return updates

    async def _update_some(
        self, servers: list[Served], held: Upstream | None, weights: Path | None, version: int, probes: Sequence[Probe]
    ) -> tuple[list[Update], dict[Served, PolicyServerError]]:
        """Update servers at once. Every gateway that serves the run stops sending calls to the server that is `held` (None: to
        all), the trainer's own last and for the update alone. Return the updates, and the errors of servers that failed."""
        own = self.gateway.own

        async def taken(each: Served) -> Update | PolicyServerError:
            try:
                return await each.server.update(weights, version, probes)
            except PolicyServerError as error:
                return error

        async with self.owner.hold(held) as hold, self.gateway.hold(held):
            servers = [each for each in servers if not each.away]  # a dead one gets the weights when it comes back
            before = {each: each.server.version for each in servers}
            try:
                results = dict(zip(servers, await all_of([taken(each) for each in servers]), strict=True))
            except BaseException:
                hold.lost = True
                own.lose()
                raise
            failed = {each: found for each, found in results.items() if isinstance(found, PolicyServerError)}
            updates = [found for found in results.values() if isinstance(found, Update)]
            # Old weights go on only where the server says so itself, and where no other server of the hold has new ones.
            lost = [each for each in failed if updates or each.server.version != before[each]]
            if updates:
                counts = {key: tokens for update in updates for key, tokens in update.in_flight.items()}
                hold.update = Update(version, counts, max(update.seconds for update in updates))
                for each in self._served:
                    if each.away:  # what is left of its calls is older
                        own.lose(each.upstream)
                own.update(hold.update, held)
            if lost and not updates and held is None:
                hold.lost = True
                own.lose()
            elif lost:
                hold.away = tuple(each.upstream for each in lost)
                for each in lost:
                    own.lose(each.upstream)
                    self._note_away(each)
                    each.refused.set()
            if failed and not updates and held is None:
                raise next(iter(failed.values()))
        return updates, failed

    def _note_away(self, each: Served) -> None:
        """Send no more calls to a server."""
        each.away = True
        self.gateway.own.pool.slot_of(each.upstream).vacate()
        if all(each.away for each in self._served):
            self._serving.clear()

    async def _recovered(self, restarts: int) -> bool:
        """Whether the policy server had died and is back. Raises the supervisor's error when it gave up."""
        for _ in range(NOTICE_SECONDS):
            if self.restarts > restarts or not self._serving.is_set() or self._gave_up():
                break
            await asyncio.sleep(1.0)
        else:
            return False
        await self._unless_supervisor_fails(asyncio.create_task(self._serving.wait()))
        return True

    def _gave_up(self) -> bool:
        return self._supervisor is not None and self._supervisor.done()

    async def _unless_supervisor_fails(self, doing: asyncio.Task[Any]) -> None:
        watching = {doing} if self._supervisor is None else {doing, self._supervisor}
        try:
            await asyncio.wait(watching, return_when=asyncio.FIRST_COMPLETED)
            if not doing.done() and self._supervisor is not None:
                self._supervisor.result()
            await doing
        finally:
            doing.cancel()
            await asyncio.gather(doing, return_exceptions=True)

    async def look_after(self) -> None:
        """Keep the policy servers, other gateways and what runs the agents running. Raises what `supervise` and the two methods
        `attend` raise."""
        others = [] if self.gateways is None else [self.gateways.attend()]
        await all_of([*(self.supervise(each) for each in self._served), self.agents.attend(), *others])

    async def supervise(self, each: Served) -> None:
        """Bring a dead policy server back with the current weights. Its rollouts' calls go to other servers meanwhile; without
        any they wait.

        Raises `PolicyServerError` when it dies more than MAX_RESTARTS times without a step in between.
        """
        most = max(MAX_RESTARTS, EXCUSED + self.config.runner.max_attempts)
        own, number = self.gateway.own, self._served.index(each)
        log = log_of_server(self.folder, number, len(self._served))
        while True:
            await each.gone()
            self.restarts += 1
            each.deaths += 1
            if each.deaths > most:
                raise PolicyServerError(f"the policy server died {each.deaths} times within one step; see {log}")
            logger.warning("the policy server died; restarting it with version %d", self.version)
            with own.gate.hold(number, RESTARTING):
                self._note_away(each)
                await self.owner.away(each.upstream)
                await each.server.restart(self.weights, self.version)
                async with self._changing:
                    await self._bring_back(each)

    async def _bring_back(self, each: Served) -> None:
        """Send calls to a server that was started again, once it has the newest weights. If it fails to take those, it is
        started again once more."""
        each.refused.clear()
        try:
            if each.server.version != self.version:
                await each.server.update(self.weights, self.version)
        except PolicyServerError as error:
            logger.warning("the policy server at %s did not take the newest weights: %s", each.upstream.url, error)
            each.refused.set()
            return
        now = upstream_of(each.server)
        self.gateway.own.pool.replace(each.upstream, now, self.version)
        await self.owner.back(each.upstream, now, self.version)
        each.upstream, each.away = now, False
        self._serving.set()

    @property
    def complete(self) -> bool:
        """Whether every server has the weights of `version`: none is started again now."""
        return not any(each.away for each in self._served)

    def upstreams(self) -> list[Upstream]:
        """Where the policy is served."""
        return [upstream_of(server) for server in self.servers]

    def there(self) -> list[Upstream | None]:
        """Where each server of the policy is; None while it is started again, until it has its weights."""
        return [None if each.away else each.upstream for each in self._served]

    async def tell_how_to_call(self) -> None:
        """Tell other servers over the store how this run's agents are to call the model."""
        await self._how.keep(self.store, self.run.id)

    @property
    def _how(self) -> HowToCall:
        prompts, trainer = self.prompts, self.config.trainer
        seed = trainer.seed if self.config.runner.seed_agents else None
        return HowToCall(prompts.own, prompts.bound, prompts.versions, trainer.eval_temperature, seed)


def upstream_of(policy: PolicyServer) -> Upstream:
    """A policy server that has started, as gateways know it and no other."""
    return Upstream(policy.url, policy.alias, policy.claim, tuple(policy.models))


def seed_of(config: Config) -> int | None:
    """What the calls of a run are seeded with; None where they are not."""
    return config.trainer.seed if config.gateway.seed_calls else None


def check_gateway(config: GatewayConfig) -> Line:
    """The stages of a gateway with these settings. Raises what making one raises (`ConfigError`, `GatewayError`), before
    anything is started."""
    return Gateway(MemoryStore(), (), config, secret=secrets.token_bytes()).parts.line


async def make_gateway(
    store: Store, servers: Sequence[PolicyServer], config: Config, run: str, *, shared: bool = False
) -> Gateway:
    """A gateway in front of policy servers that have started. With `shared` other servers answer for its keys, too."""
    secret, version, seed = await gateway_secret(store), servers[0].version, seed_of(config)
    return Gateway(
        store,
        [upstream_of(server) for server in servers],
        config.gateway,
        secret=secret,
        version=version,
        run=run,
        shared=shared,
        seed=seed,
        agents=config.runner.concurrency,
    )


async def open_gateway(
    resources: AsyncExitStack,
    store: Store,
    servers: Sequence[PolicyServer],
    config: Config,
    run: str,
    *,
    waiting: AsyncExitStack | None = None,
    door: ClientDoor | None = None,
    gateways: GatewayProcesses | None = None,
) -> Gateway:
    """`make_gateway`, started; `resources` closes it. With `waiting` calls wait until that is closed. A `door` answers clients
    on its port. Other `gateways` are started, too, and agents call them."""
    gateway = await make_gateway(store, servers, config, run, shared=door is not None or gateways is not None)
    resources.push_async_callback(gateway.close)
    if door is not None:
        door.open(store, gateway)
        resources.push_async_callback(door.close)
    if waiting is not None:
        await waiting.enter_async_context(gateway.hold())
    await gateway.start()
    if gateways is not None:
        resources.push_async_callback(gateways.close)
        await gateways.start(gateway)
    return gateway


async def open_stack(
    resources: AsyncExitStack,
    *,
    run: Run,
    config: Config,
    folder: Path,
    model: Path,
    store: Store,
    runner: Runner,
    prompts: Prompts | None = None,
    restores: bool,
    sender: object | None = None,
    store_url: str = "",
) -> Stack:
    """Start everything that serves and runs agents; `resources` closes it. The store must be open already, and is that of all
    projects.

    With `restores` the policy server does not have the run's weights yet: calls wait for the first `Stack.update`. `sender` is
    the engine's, where its weights are in another process than this one. With the URL of the store, gateways in other
    processes may answer the calls.
    """
    models = await asyncio.to_thread(served_models, model, config)
    weights_folder = WeightsFolder(config.policy_server, [each.folder for each in models], folder, here=sender is None)
    resources.callback(weights_folder.close)  # after vLLM has ended
    door = door_for(runner, config)
    served, each = config if door is None else door.config, settings_of_servers(config)
    check_ports(served.gateway, *(settings.policy_server for settings in each))
    if (gateways := gateways_for(served, store_url)) is not None:
        resources.push_async_callback(gateways.close)
    servers = make_policy_servers(models, config, each, runner.concurrency, folder=folder, sender=sender)
    for server in servers:
        resources.push_async_callback(server.close)
    resources.push_async_callback(runner.close)
    await check_exposure(store, served.gateway.host)
    owner = owner_of(store, run.id, seed_of(config))
    await owner.open((), UNKNOWN)  # whatever answers now where a dead trainer's server did is not this run's policy
    await all_of([*(server.start() for server in servers), runner.start()])
    await check_servers(servers)
    if not restores:
        check_versions(servers)
    waiting = AsyncExitStack()
    gateway = await open_gateway(
        resources, store, servers, served, run.id, waiting=waiting if restores else None, door=door, gateways=gateways
    )
    stack = Stack(
        run,
        config,
        folder,
        of_project(store, run.project),
        servers,
        gateway,
        runner,
        weights_folder,
        prompts or Prompts(),
        servers[0].version,
        waiting=waiting,
        gateways=gateways,
    )
    stack.owner = owner
    resources.push_async_callback(owner.close)
    await owner.serve(stack.upstreams(), UNKNOWN if restores else servers[0].version)
    if door is not None:
        stack.agents = await door.agents(stack)
    stack._supervisor = asyncio.create_task(stack.look_after())  # noqa: SLF001 — the factory completes its own class
    resources.push_async_callback(cancel, stack._supervisor)  # noqa: SLF001 — as above
    return stack


def make_policy_servers(
    models: Sequence[ServedModel],
    config: Config,
    each: Sequence[Config],
    agents: int,
    *,
    folder: Path,
    sender: object | None,
) -> list[PolicyServer]:
    """Make the policy servers of a run, of which `each` has settings of its own, in the order of the models. So many `agents`
    will call those of one model (0: `runner.concurrency`)."""
    replicas = len(each) // len(models)
    demand = Demand(
        -(-(agents or config.runner.concurrency) // replicas),
        trains_meanwhile=config.trainer.max_staleness > 0,
        shares_gpu=shares_gpu(config),
        servers=len(each),
    )
    return [
        make_policy_server(
            models[number // replicas].folder,
            settings,
            log=log_of_server(folder, number, len(each)),
            sender=sender,
            demand=demand,
            transfer=models[number // replicas].transfer,
        )
        for number, settings in enumerate(each)
    ]


def check_versions(servers: Sequence[PolicyServer]) -> None:
    """Raise `PolicyServerError` for servers with weights of different versions."""
    if len({server.version for server in servers}) > 1:
        told = ", ".join(f"{server.url} has version {server.version}" for server in servers)
        raise PolicyServerError(f"the policy servers have different weights: {told}. Start them anew with one model")


def check_ports(gateway: GatewayConfig, *servers: PolicyServerConfig) -> None:
    """Raise where a port that this process will listen on is taken: before vLLM, which takes minutes, is started."""
    if gateway.port:
        bind(gateway.host, gateway.port).close()
    for server in servers:
        if server.port and not server.is_elsewhere:
            with reserved_port(server.host, server.port):
                pass
