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

from lightning.asyncio_utils import cancel, together
from lightning.config import Config
from lightning.config.sections import GatewayConfig, PolicyServerConfig
from lightning.errors import PolicyServerError
from lightning.gateway import Gateway, Upstream
from lightning.gateway.connections import bind
from lightning.gateway.identity import gateway_secret
from lightning.gateway.policy import UNKNOWN, owner_of
from lightning.gateway.stages import Line
from lightning.policy_server.auto_settings import Demand, shares_gpu
from lightning.policy_server.protocol import PolicyServer, Probe, Update
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


@dataclass
class Stack:
    """What the loop works with. Make one with `open_stack`. Until the first update `waiting` may hold calls.

    `store` is as the run's project sees it, with the project's own names for resources.
    """

    run: Run
    config: Config
    folder: Path
    store: Store
    policy: PolicyServer
    gateway: Gateway
    runner: Runner
    weights_folder: WeightsFolder
    prompts: Prompts = field(default_factory=Prompts)
    version: int = 0
    weights: Path | None = None
    restarts: int = 0
    waiting: AsyncExitStack = field(default_factory=AsyncExitStack, repr=False)
    gateways: GatewayProcesses | None = None
    _deaths: int = field(default=0, repr=False)
    _supervisor: asyncio.Task[object] | None = field(default=None, repr=False)
    _serving: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    def __post_init__(self) -> None:
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

    async def update(self, weights: Path | None, version: int, probe: Probe | None) -> Update:
        """Put new weights into the policy server; requests that arrive meanwhile wait. None: those it has are `version` now."""
        restarts = self.restarts
        try:
            update = await self._update(weights, version, probe)
        except PolicyServerError:
            if not await self._recovered(restarts):
                raise
            update = await self._update(weights, version, probe)
        self.version, self.weights = version, weights or self.weights
        self.advanced()
        await self.waiting.aclose()
        return update

    @asynccontextmanager
    async def resting(self) -> AsyncIterator[None]:
        """For the length of the block the policy server's GPU is the trainer's, where both have the same and take turns: vLLM
        gives back what it has there, and calls wait."""
        if self.config.trainer.max_staleness or not shares_gpu(self.config):
            yield
            return
        async with self.gateway.hold():
            restarts = self.restarts
            try:
                await self.policy.sleep()
            except PolicyServerError:
                if not await self._recovered(restarts):
                    raise
                restarts = self.restarts
                await self.policy.sleep()
            try:
                yield
            finally:
                try:
                    await self.policy.wake()
                except PolicyServerError:
                    if not await self._recovered(restarts):
                        raise

    def advanced(self) -> None:
        """A step was taken. The policy server works, so that deaths before it are no reason to end a run of weeks."""
        self._deaths = 0

    async def _update(self, weights: Path | None, version: int, probe: Probe | None) -> Update:
        """Every gateway that serves the run stops sending calls, the trainer's own last and for the update alone."""
        before = self.policy.version
        async with self.owner.hold() as hold, self.gateway.hold():
            try:
                update = await self.policy.update(weights, version, probe)
            except BaseException as error:
                # The old weights go on only where the policy server says so itself.
                if not isinstance(error, PolicyServerError) or self.policy.version != before:
                    hold.lost = True
                    self.gateway.own.lose()
                raise
            self.gateway.own.update(update)
            hold.update = update
        return update

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
        """Keep the policy server, other gateways and what runs the agents running. Raises what `supervise` and the two methods
        `attend` raise."""
        looking = together(self.supervise(), self.agents.attend())
        await (looking if self.gateways is None else together(looking, self.gateways.attend()))

    async def supervise(self) -> None:
        """Bring a dead policy server back with the current weights while requests wait.

        Raises `PolicyServerError` when it dies more than MAX_RESTARTS times without a step in between.
        """
        most = max(MAX_RESTARTS, EXCUSED + self.config.runner.max_attempts)
        while True:
            await self.policy.wait_died()
            self.restarts += 1
            self._deaths += 1
            if self._deaths > most:
                raise PolicyServerError(
                    f"the policy server died {self._deaths} times within one step; see {self.folder / 'vllm.log'}"
                )
            logger.warning("the policy server died; restarting it with version %d", self.version)
            self._serving.clear()
            (old,) = self.upstreams()
            async with self.owner.moving(self.upstreams), self.gateway.hold():
                self.gateway.own.pool.vacate()
                await self.policy.restart(self.weights, self.version)
                (new,) = self.upstreams()
                self.gateway.own.pool.replace(old, new)
            self._serving.set()

    def upstreams(self) -> list[Upstream]:
        """Where the policy is served."""
        return [upstream_of(self.policy)]

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
    return Upstream(policy.url, policy.alias, policy.claim)


def seed_of(config: Config) -> int | None:
    """What the calls of a run are seeded with; None where they are not."""
    return config.trainer.seed if config.gateway.seed_calls else None


def check_gateway(config: GatewayConfig) -> Line:
    """The stages of a gateway with these settings. Raises what making one raises (`ConfigError`, `GatewayError`), before
    anything is started."""
    return Gateway(MemoryStore(), (), config, secret=secrets.token_bytes()).parts.line


async def make_gateway(
    store: Store, policy: PolicyServer, config: Config, run: str, *, shared: bool = False
) -> Gateway:
    """A gateway in front of a policy server that has started. With `shared` other servers answer for its keys, too."""
    secret, version, seed = await gateway_secret(store), policy.version, seed_of(config)
    return Gateway(
        store,
        [upstream_of(policy)],
        config.gateway,
        secret=secret,
        version=version,
        run=run,
        shared=shared,
        seed=seed,
    )


async def open_gateway(
    resources: AsyncExitStack,
    store: Store,
    policy: PolicyServer,
    config: Config,
    run: str,
    *,
    waiting: AsyncExitStack | None = None,
    door: ClientDoor | None = None,
    gateways: GatewayProcesses | None = None,
) -> Gateway:
    """`make_gateway`, started; `resources` closes it. With `waiting` calls wait until that is closed. A `door` answers clients
    on its port. Other `gateways` are started, too, and agents call them."""
    gateway = await make_gateway(store, policy, config, run, shared=door is not None or gateways is not None)
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
    weights_folder = WeightsFolder(config.policy_server, model, folder, here=sender is None)
    resources.callback(weights_folder.close)  # after vLLM has ended
    door = door_for(runner, config)
    served = config if door is None else door.config
    check_ports(served.gateway, config.policy_server)
    if (gateways := gateways_for(served, store_url)) is not None:
        resources.push_async_callback(gateways.close)
    demand = Demand(
        runner.concurrency or config.runner.concurrency,
        trains_meanwhile=config.trainer.max_staleness > 0,
        shares_gpu=shares_gpu(config),
    )
    policy = make_policy_server(model, config, log=folder / "vllm.log", sender=sender, demand=demand)
    resources.push_async_callback(policy.close)
    resources.push_async_callback(runner.close)
    await check_exposure(store, served.gateway.host)
    owner = owner_of(store, run.id, seed_of(config))
    await owner.open((), UNKNOWN)  # whatever answers now where a dead trainer's server did is not this run's policy
    await together(policy.start(), runner.start())
    waiting = AsyncExitStack()
    gateway = await open_gateway(
        resources, store, policy, served, run.id, waiting=waiting if restores else None, door=door, gateways=gateways
    )
    stack = Stack(
        run,
        config,
        folder,
        of_project(store, run.project),
        policy,
        gateway,
        runner,
        weights_folder,
        prompts or Prompts(),
        policy.version,
        waiting=waiting,
        gateways=gateways,
    )
    stack.owner = owner
    resources.push_async_callback(owner.close)
    await owner.serve(stack.upstreams(), UNKNOWN if restores else policy.version)
    if door is not None:
        stack.agents = await door.agents(stack)
    stack._supervisor = asyncio.create_task(stack.look_after())  # noqa: SLF001 — the factory completes its own class
    resources.push_async_callback(cancel, stack._supervisor)  # noqa: SLF001 — as above
    return stack


def check_ports(gateway: GatewayConfig, server: PolicyServerConfig) -> None:
    """Raise where a port that this process will listen on is taken: before vLLM, which takes minutes, is started."""
    if gateway.port:
        bind(gateway.host, gateway.port).close()
    if server.port and not server.attach:
        with reserved_port(server.host, server.port):
            pass
