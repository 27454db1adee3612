"""Leases rollouts, runs their agents and reports the outcomes, until the run has nothing left to do.

The invariant: a lease this worker holds is renewed while its agent runs and is completed or given back before the work ends,
however it ends. With a `Source` there is always more to do, and a rollout is made only when there is room to run it.

A `Delivery` hands out leases and takes outcomes: the store itself for agents beside the trainer (`work`), a server for a client
on another machine. Both use the same loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, cast

from lightning.asyncio_utils import cancel, to_its_end
from lightning.config import RunnerConfig
from lightning.errors import StaleAttemptError
from lightning.gateway.stages import NO_LINE, Line
from lightning.plugins.stages import StageError
from lightning.runner.attempt_completion import report
from lightning.runner.protocol import Runner
from lightning.store.protocol import RunWatch, Store
from lightning.types import LLM, Fault, Lease, Outcome, Rollout, Status

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""Seconds without news after which leases are requested anyway: no news is sent when another worker's lease expires."""


class Source(Protocol):
    """Creates rollouts for a worker that never stops."""

    @property
    def changed(self) -> asyncio.Event:
        """Set when `refill` may be able to create rollouts that it could not before, or when others created rollouts."""

    async def refill(self) -> bool:
        """Create some rollouts if the source may begin more now, and return whether it created any. The worker calls `refill`
        when it has free capacity and no rollout is pending."""

    def unwanted(self, rollout: Rollout) -> str:
        """Return why nobody wants this rollout any more, so that it is ended without a reward; "" while it is wanted. Asked
        before an attempt, and during it whenever `changed` was set."""


class Delivery(Protocol):
    """Hands out attempts to one worker and takes their outcomes."""

    def watch(self) -> AbstractAsyncContextManager[RunWatch]:
        """Watch for changes after which there may be attempts to lease."""

    async def lease(self, limit: int) -> Sequence[tuple[Lease, LLM | StageError]]:
        """Lease up to `limit` attempts to run. Each lease comes with the model as its agent sees it, or with the failure of a
        plugin's stage that was to add to the model."""

    async def renew(self, lease: Lease) -> None:
        """Renew a lease. Raises `StaleAttemptError` if a later attempt has begun or the attempt has ended."""

    async def report(self, lease: Lease, outcome: Outcome) -> Rollout | None:
        """End an attempt with its outcome and return its rollout. None means that the outcome was not taken, which this method
        has logged; the lease then expires.

        Raises `StaleAttemptError` if a later attempt has begun, or the attempt has ended with another outcome.
        """

    async def release(self) -> None:
        """Give back every lease that this worker holds, or held before it was restarted."""

    async def unfinished(self) -> bool:
        """Whether this worker or another may have more attempts to run. Called when this worker runs no agent."""


async def work(
    store: Store,
    runner: Runner,
    run: str,
    llm_for: Callable[[Lease], LLM],
    *,
    worker: str,
    config: RunnerConfig,
    line: Line = NO_LINE,
    on_finished: Callable[[Rollout], None] | None = None,
    source: Source | None = None,
) -> None:
    """Run the pending rollouts of a run, as `worker`, until no rollout is pending or running any more.

    With a `source` it goes on until it is cancelled, and asks the source for more rollouts whenever it has free capacity and no
    rollout is pending.

    `worker` names this process in leases; leases that it held before a restart are given back first. The gateway's stages, in
    `line`, are asked about each outcome before the outcome is stored. `on_finished` is called with each rollout that ends here
    for good. Cancelling ends the agents and gives the leases back. Errors of the store, of `llm_for`, of `on_finished` and of
    `source` propagate; `RunnerError` means that no agent can be run.
    """
    delivery = _FromStore(store, run, llm_for, worker, config.lease_ttl, source, line)
    news, unwanted = (source.changed, source.unwanted) if source else (None, _wanted)
    await deliver(delivery, runner, config, on_finished=on_finished, news=news, unwanted=unwanted)


def _wanted(rollout: Rollout) -> str:
    return ""


async def deliver(
    delivery: Delivery,
    runner: Runner,
    config: RunnerConfig,
    *,
    on_finished: Callable[[Rollout], None] | None = None,
    news: asyncio.Event | None = None,
    unwanted: Callable[[Rollout], str] = _wanted,
) -> None:
    """Run the attempts that `delivery` hands out until it has no more.

    When `news` is set, the loop clears it, asks for attempts again at once, and ends the attempts of rollouts that are
    `unwanted` (`Source.unwanted`). Cancelling, `on_finished` and errors are as in `work`.
    """
    await _Worker(delivery, runner, config, on_finished, news or asyncio.Event(), unwanted).execute()


class _FromStore:
    """The `Delivery` that leases the rollouts of one run from the store itself."""

    def __init__(
        self,
        store: Store,
        run: str,
        llm_for: Callable[[Lease], LLM],
        worker: str,
        ttl: float,
        source: Source | None,
        line: Line,
    ) -> None:
        self._store, self._run, self._llm_for, self._line = store, run, llm_for, line
        self._worker, self._ttl, self._source = worker, ttl, source

    def watch(self) -> AbstractAsyncContextManager[RunWatch]:
        return self._store.watch(self._run)

    async def lease(self, limit: int) -> Sequence[tuple[Lease, LLM | StageError]]:
        leases: list[Lease] = []
        while free := limit - len(leases):
            more = await self._store.lease(self._run, self._worker, limit=free, ttl=self._ttl)
            leases += more
            if len(more) == free or self._source is None or not await self._source.refill():
                break
        return [(lease, self._model_of(lease)) for lease in leases]

    def _model_of(self, lease: Lease) -> LLM | StageError:
        try:
            return self._llm_for(lease)
        except StageError as error:
            return error

    async def renew(self, lease: Lease) -> None:
        await self._store.renew(lease, ttl=self._ttl)

    async def report(self, lease: Lease, outcome: Outcome) -> Rollout:
        return await report(self._store, lease.rollout.id, lease.attempt, outcome, self._line)

    async def release(self) -> None:
        await self._store.release(self._worker)

    async def unfinished(self) -> bool:
        if self._source is not None:
            return True
        for status in (Status.PENDING, Status.RUNNING):
            page = await self._store.list_rollouts(self._run, status=status, limit=1)
            if page.items:
                return True
        return False


class _Worker:
    """The state of one call of `deliver`."""

    def __init__(
        self,
        delivery: Delivery,
        runner: Runner,
        config: RunnerConfig,
        on_finished: Callable[[Rollout], None] | None,
        news: asyncio.Event,
        unwanted: Callable[[Rollout], str],
    ) -> None:
        self._delivery, self._runner, self._config, self._on_finished = delivery, runner, config, on_finished
        self._news, self._unwanted = news, unwanted
        self._concurrency = min(runner.concurrency, config.concurrency)
        self._running: dict[asyncio.Task[Outcome], Rollout] = {}  # but those whose end was asked for
        self._held: dict[asyncio.Task[None], Lease] = {}  # leases to renew: until their outcomes are taken
        self._reporting: set[asyncio.Task[None]] = set()
        self._stale = 0

    async def execute(self) -> None:
        await self._delivery.release()
        async with self._delivery.watch() as watch:
            beside = [self._begin(self._heartbeat()), self._begin(self._look(watch))]
            try:
                while await self._more():
                    await self._news.wait()
                    self._news.clear()
                    self._collect(beside)
            except BaseException:
                await cancel(*beside, *self._held)
                await self._release_anyway()
                raise
            else:
                await cancel(*beside)
                await to_its_end(self._delivery.release())
            finally:
                if self._stale:
                    logger.warning("%d outcomes came too late: their attempts had been given to others", self._stale)

    def _begin(self, doing: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Begin a task whose end is news."""
        task = asyncio.create_task(doing)
        task.add_done_callback(lambda _: self._news.set())
        return task

    async def _more(self) -> bool:
        """Lease as many attempts as there is free capacity for. Return False when neither this worker nor another has attempts
        left to run."""
        free = self._concurrency - len(self._held)
        for lease, llm in await self._delivery.lease(free) if free else ():
            self._held[self._begin(self._attempt(lease, llm))] = lease
        return bool(self._held) or await self._delivery.unfinished()

    def _collect(self, beside: Iterable[asyncio.Task[None]]) -> None:
        """Forget the attempts that have ended. Raises the error of one, or of a task `beside` them."""
        for task in beside:
            if task.done():
                task.result()
        for task in [task for task in self._held if task.done()]:
            del self._held[task]
            self._reporting.discard(task)
            if not task.cancelling():  # else its lease was taken over
                task.result()
        for running, rollout in list(self._running.items()):
            if self._unwanted(rollout):
                running.cancel()
                del self._running[running]  # a second cancellation would cut its clean-up short

    async def _attempt(self, lease: Lease, llm: LLM | StageError) -> None:
        outcome = await self._outcome(lease, llm)
        self._reporting.add(cast("asyncio.Task[None]", asyncio.current_task()))
        try:
            rollout = await self._delivery.report(lease, outcome)
        except StaleAttemptError as error:
            self._too_late(lease, error)
            return
        if rollout is None:
            return
        if rollout.status is Status.PENDING:
            logger.info(
                "rollout %s, attempt %d failed and will be retried: %s", rollout.id, lease.attempt, outcome.error
            )
        elif self._on_finished is not None:
            self._on_finished(rollout)

    async def _outcome(self, lease: Lease, llm: LLM | StageError) -> Outcome:
        """Run the agent of a lease, unless its rollout is unwanted, and until it is."""
        if why := self._unwanted(lease.rollout):
            return Outcome(fault=Fault.CANCELLED, error=why)
        if isinstance(llm, StageError):  # it fails this attempt alone
            return Outcome(fault=Fault.INFRASTRUCTURE, error=str(llm))
        running = asyncio.ensure_future(self._runner.run(lease, llm))
        self._running[running] = lease.rollout
        try:
            return await running
        except asyncio.CancelledError:
            why, me = self._unwanted(lease.rollout), asyncio.current_task()
            if not why or (me is not None and me.cancelling()):
                raise
            return Outcome(fault=Fault.CANCELLED, error=why)
        finally:
            self._running.pop(running, None)

    async def _heartbeat(self) -> None:
        """Renew all leases at intervals, until cancelled. End the agent of a lease that another worker has taken over."""
        while True:
            await asyncio.sleep(self._config.lease_ttl / 3)
            await asyncio.gather(*(self._renew(task, lease) for task, lease in self._held.items()))

    async def _look(self, watch: RunWatch) -> None:
        """Have leases requested when the run has changed, or after `LOOK_SECONDS`, until cancelled."""
        while True:
            await watch.wait(LOOK_SECONDS)
            self._news.set()

    async def _renew(self, task: asyncio.Task[None], lease: Lease) -> None:
        try:
            await self._delivery.renew(lease)
        except StaleAttemptError as error:
            if not task.done() and task not in self._reporting:  # else its report finds that out
                task.cancel()
                self._too_late(lease, error)

    async def _release_anyway(self) -> None:
        """Give the leases back while an error propagates. An error of the release is only logged, so that the first error stays
        visible."""
        try:
            await self._delivery.release()
        except Exception as error:  # noqa: BLE001 — the first error says more
            logger.warning("leases were not given back and will expire: %s", error)

    def _too_late(self, lease: Lease, error: StaleAttemptError) -> None:
        self._stale += 1
        logger.warning("rollout %s, attempt %d: %s", lease.rollout.id, lease.attempt, error)
