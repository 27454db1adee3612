"""The running parts of a training run: store, policy server, gateway, runner; opened together, closed in reverse.

The invariant: whatever fails while opening or running, everything that was started is stopped, and nothing acknowledged
is lost.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from lightning.config import Config
from lightning.errors import PolicyServerError
from lightning.gateway import Gateway, Upstream
from lightning.policy_server import make_policy_server
from lightning.policy_server.protocol import PolicyServer, Probe, Update
from lightning.runner.protocol import Runner
from lightning.runner.work import Source, work
from lightning.store.protocol import Store
from lightning.trainer.plan import TRAIN
from lightning.trainer.prompts import Prompts
from lightning.types import LLM, Lease, Rollout, Run

logger = logging.getLogger(__name__)
A = TypeVar("A")
B = TypeVar("B")

MAX_RESTARTS = 5
"""A policy server that dies more often than this in one run has a fault of its own."""


NOTICE_SECONDS = 5
"""How long a failed update waits to hear that the policy server has died."""


def _set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass
class Stack:
    """What the loop works with. Make one with `open_stack`."""

    run: Run
    config: Config
    folder: Path
    store: Store
    policy: PolicyServer
    gateway: Gateway
    runner: Runner
    prompts: Prompts = field(default_factory=Prompts)
    version: int = 0
    weights: Path | None = None
    restarts: int = 0
    _supervisor: asyncio.Task[None] | None = field(default=None, repr=False)
    _serving: asyncio.Event = field(default_factory=_set_event, repr=False)

    def llm(self, lease: Lease) -> LLM:
        """The model as one attempt sees it; evaluations may fix the temperature."""
        temperature = self.config.trainer.eval_temperature
        if lease.rollout.split != TRAIN and temperature is not None:
            llm = self.gateway.llm(lease, sampling={"temperature": temperature})
        else:
            llm = self.gateway.llm(lease)
        return replace(llm, prompts=self.prompts.of(lease.rollout))

    async def create(self, rollouts: Sequence[Rollout]) -> None:
        """Create rollouts (again, harmlessly, after a resume) that run with the run's prompts."""
        await self.store.create_rollouts(await self.prompts.stamp(self.store, rollouts))

    async def execute(self, rollouts: list[Rollout], on_finished: Callable[[Rollout], None]) -> None:
        """Create the rollouts (again, harmlessly, after a resume) and run every unfinished one to its end."""
        await self.create(rollouts)
        await self._work(on_finished)

    async def sample(self, source: Source, on_finished: Callable[[Rollout], None]) -> None:
        """Run rollouts, and ask the source for more, until it is cancelled."""
        await self._work(on_finished, source)

    async def _work(self, on_finished: Callable[[Rollout], None], source: Source | None = None) -> None:
        doing = asyncio.create_task(
            work(
                self.store,
                self.runner,
                self.run.id,
                self.llm,
                worker=f"{self.run.id}/local",
                config=self.config.runner,
                on_finished=on_finished,
                source=source,
            )
        )
        await self._unless_supervisor_fails(doing)

    async def update(self, weights: Path, version: int, probe: Probe | None) -> Update:
        """Put new weights into the policy server; requests that arrive meanwhile wait."""
        restarts = self.restarts
        try:
            update = await self._update(weights, version, probe)
        except PolicyServerError:
            if not await self._recovered(restarts):
                raise
            update = await self._update(weights, version, probe)
        self.version, self.weights = version, weights
        return update

    async def _update(self, weights: Path, version: int, probe: Probe | None) -> Update:
        async with self.gateway.hold():
            update = await self.policy.update(weights, version, probe)
            self.gateway.policy_updated(update)
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

    async def supervise(self) -> None:
        """Bring a dead policy server back with the current weights while requests wait; give up after MAX_RESTARTS."""
        while True:
            await self.policy.wait_died()
            self.restarts += 1
            if self.restarts > MAX_RESTARTS:
                raise PolicyServerError(
                    f"the policy server died {self.restarts} times in this run; see {self.folder / 'vllm.log'}"
                )
            logger.warning("the policy server died; restarting it with version %d", self.version)
            self._serving.clear()
            old = Upstream(self.policy.url, self.policy.model)
            async with self.gateway.hold():
                await self.policy.restart(self.weights, self.version)
                self.gateway.replace_upstream(old, Upstream(self.policy.url, self.policy.model))
            self._serving.set()


async def gateway_secret(store: Store, run: str) -> bytes:
    """The run's signing secret: made once and kept with the run, so that tokens outlive a restart."""
    kept = await store.get_state(run, "gateway_secret")
    if not isinstance(kept, str):
        kept = secrets.token_hex(32)
        await store.put_state(run, "gateway_secret", kept)
    return bytes.fromhex(kept)


async def open_gateway(
    resources: AsyncExitStack, store: Store, policy: PolicyServer, config: Config, run: str
) -> Gateway:
    """A gateway in front of a policy server that has started; `resources` closes it."""
    secret = await gateway_secret(store, run)
    upstream = Upstream(policy.url, policy.model)
    gateway = Gateway(store, [upstream], config.gateway, secret=secret, version=policy.version)
    await gateway.start()
    resources.push_async_callback(gateway.close)
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
) -> Stack:
    """Start everything that serves and runs agents; `resources` closes it. The store must be open already."""
    policy = make_policy_server(model, config.policy_server, log=folder / "vllm.log")
    resources.push_async_callback(policy.close)
    resources.push_async_callback(runner.close)
    await together(policy.start(), runner.start())
    gateway = await open_gateway(resources, store, policy, config, run.id)
    stack = Stack(run, config, folder, store, policy, gateway, runner, prompts or Prompts(), policy.version)
    stack._supervisor = asyncio.create_task(stack.supervise())  # noqa: SLF001 — the factory completes its own class
    resources.push_async_callback(_stop, stack._supervisor)  # noqa: SLF001 — as above
    return stack


async def together(first: Coroutine[object, object, A], second: Coroutine[object, object, B]) -> tuple[A, B]:
    """Do two things at once; when one fails the other is stopped before its error is raised."""
    one, other = asyncio.create_task(first), asyncio.create_task(second)
    try:
        return await asyncio.gather(one, other)
    finally:
        one.cancel()
        other.cancel()
        await asyncio.gather(one, other, return_exceptions=True)


async def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
