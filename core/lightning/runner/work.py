"""Leases rollouts, runs their agents, reports the outcomes, until nothing of the run is left to do.

The invariant: a lease this worker holds is renewed while its agent runs and is completed or given back before `work`
returns, however it returns; an outcome is judged against the calls that the store has, not against the agent's word.
With a `Source` there is always more to do, and a rollout is made only when there is room to run it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, cast

from lightning.config import RunnerConfig
from lightning.errors import StaleAttemptError
from lightning.plugins import plugins
from lightning.runner.protocol import Runner
from lightning.spans.derive import with_spans
from lightning.store.protocol import Store
from lightning.types import LLM, CallStatus, Fault, Lease, Outcome, Rollout, Status, Transition

logger = logging.getLogger(__name__)

POLL = 0.5
"""Seconds between looks for work that others added or gave back."""

NEVER_CALLED = "the agent returned a reward but never called the model: use llm.base_url and llm.api_key, and llm.model"
NEVER_FINISHED = (
    "the agent returned a reward but none of its model calls came to an end, so there is nothing to learn from"
)


class Source(Protocol):
    """Where a worker that never stops gets rollouts from."""

    @property
    def changed(self) -> asyncio.Event:
        """Set when `refill` may have something that it had not before, or when rollouts were created by others."""

    async def refill(self) -> bool:
        """Create some rollouts, if it is time for them; asked when there is room and nothing is pending."""


async def work(
    store: Store,
    runner: Runner,
    run: str,
    llm_for: Callable[[Lease], LLM],
    *,
    worker: str,
    config: RunnerConfig,
    on_finished: Callable[[Rollout], None] | None = None,
    source: Source | None = None,
) -> None:
    """Run every rollout of a run that is pending, as `worker`, until none is pending or running any more.

    With a `source` it goes on until it is cancelled, and asks for more whenever there is room.

    `worker` names this process in leases; what it held before (a restart) is given back first. `on_finished` and the hook
    `rollout_finished` hear of each rollout that ends here for good. Cancelling ends the agents and gives the leases back.
    Errors of the store, of `llm_for`, of `on_finished` and of `source` propagate; `RunnerError` means that no agent can be
    run.
    """
    await _Work(store, runner, run, llm_for, worker, config, on_finished, source).execute()


class _Work:
    """One call of `work`."""

    def __init__(
        self,
        store: Store,
        runner: Runner,
        run: str,
        llm_for: Callable[[Lease], LLM],
        worker: str,
        config: RunnerConfig,
        on_finished: Callable[[Rollout], None] | None,
        source: Source | None,
    ) -> None:
        self._store, self._runner, self._run, self._llm_for = store, runner, run, llm_for
        self._worker, self._config, self._on_finished, self._source = worker, config, on_finished, source
        self._concurrency = min(runner.concurrency, config.concurrency)
        self._attempts: set[asyncio.Task[None]] = set()
        self._held: dict[asyncio.Task[None], Lease] = {}  # what the heartbeat renews: until the outcome is reported
        self._superseded: set[asyncio.Task[None]] = set()
        self._stale = 0

    async def execute(self) -> None:
        await self._store.release(self._worker)
        heartbeat, news = asyncio.create_task(self._heartbeat()), asyncio.create_task(self._news())
        try:
            while await self._lease():
                waiting = {heartbeat, news, *self._attempts}
                await asyncio.wait(waiting, timeout=POLL, return_when=asyncio.FIRST_COMPLETED)
                if heartbeat.done():
                    heartbeat.result()
                if news.done():
                    news = asyncio.create_task(self._news())
                self._collect()
        except BaseException:
            await _end([heartbeat, news, *self._attempts])
            await self._release_anyway()
            raise
        else:
            await _end([heartbeat, news])
            await self._store.release(self._worker)
        finally:
            if self._stale:
                logger.warning("%d outcomes came too late: their attempts had been given to others", self._stale)

    async def _release_anyway(self) -> None:
        """Give the leases back while an error is going out, which must stay the one that is seen."""
        try:
            await self._store.release(self._worker)
        except Exception as error:  # noqa: BLE001 — the first error says more
            logger.warning("the leases of worker %r were not given back and will expire: %s", self._worker, error)

    async def _lease(self) -> bool:
        """Take what there is room for; False when this run has nothing left to do, here or elsewhere."""
        while free := self._concurrency - len(self._attempts):
            leases = await self._store.lease(self._run, self._worker, limit=free, ttl=self._config.lease_ttl)
            for lease in leases:
                task = asyncio.create_task(self._attempt(lease))
                self._attempts.add(task)
                self._held[task] = lease
            if len(leases) == free or self._source is None or not await self._source.refill():
                break
        return bool(self._attempts) or self._source is not None or await self._unfinished()

    async def _news(self) -> None:
        """Return when the source has changed; never, without one."""
        if self._source is None:
            await asyncio.Event().wait()
            return
        await self._source.changed.wait()
        self._source.changed.clear()

    async def _unfinished(self) -> bool:
        for status in (Status.PENDING, Status.RUNNING):
            page = await self._store.list_rollouts(self._run, status=status, limit=1)
            if page.rollouts:
                return True
        return False

    def _collect(self) -> None:
        for task in [task for task in self._attempts if task.done()]:
            self._attempts.discard(task)
            self._held.pop(task, None)
            if task in self._superseded:
                self._superseded.discard(task)
            else:
                task.result()

    async def _attempt(self, lease: Lease) -> None:
        outcome = await self._runner.run(lease, self._llm_for(lease))
        judged = outcome.fault is not Fault.INFRASTRUCTURE
        spans = await self._store.spans(lease.rollout.id, lease.attempt)
        if judged or outcome.labels or spans:
            calls = await self._store.transitions(lease.rollout.id, lease.attempt)
            _check_labels(lease, outcome, calls)
            outcome = with_spans(judge(outcome, calls) if judged else outcome, spans, calls)
        self._held.pop(cast("asyncio.Task[None]", asyncio.current_task()), None)
        try:
            rollout = await self._store.complete(lease.rollout.id, lease.attempt, outcome)
        except StaleAttemptError as error:
            self._too_late(lease, error)
            return
        if rollout.status is Status.PENDING:
            logger.info(
                "rollout %s, attempt %d failed and will be retried: %s", rollout.id, lease.attempt, outcome.error
            )
            return
        plugins().hook.rollout_finished(rollout=rollout)
        if self._on_finished is not None:
            self._on_finished(rollout)

    async def _heartbeat(self) -> None:
        """Renew every lease; end the agent of one that another worker has taken over."""
        while True:
            await asyncio.sleep(self._config.lease_ttl / 3)
            for task, lease in list(self._held.items()):
                try:
                    await self._store.renew(lease, ttl=self._config.lease_ttl)
                except StaleAttemptError as error:
                    if self._held.pop(task, None) is not None:  # else it has been reported meanwhile
                        self._superseded.add(task)
                        task.cancel()
                        self._too_late(lease, error)

    def _too_late(self, lease: Lease, error: StaleAttemptError) -> None:
        self._stale += 1
        logger.warning("rollout %s, attempt %d: %s", lease.rollout.id, lease.attempt, error)


def judge(outcome: Outcome, calls: Sequence[Transition]) -> Outcome:
    """The outcome in the light of the model calls that were recorded for it.

    A reward without a successful call is nobody's success. An agent that failed, or ran out of time, after the policy
    server had failed under it is not at fault: the attempt counts as an infrastructure failure and may be retried.
    """
    if outcome.reward is not None and not any(call.status is CallStatus.OK for call in calls):
        message = NEVER_FINISHED if calls else NEVER_CALLED
        outcome = replace(outcome, reward=None, rewards={}, fault=Fault.AGENT, error=message)
    if outcome.fault in (Fault.AGENT, Fault.TIMEOUT) and any(call.status is CallStatus.ERROR for call in calls):
        message = f"a model call failed at the policy server, then the agent: {outcome.error}"
        outcome = replace(outcome, fault=Fault.INFRASTRUCTURE, error=message)
    return outcome


def _check_labels(lease: Lease, outcome: Outcome, calls: Sequence[Transition]) -> None:
    """Say which labels name no call; the store ignores them."""
    unknown = sorted(set(outcome.labels) - {call.id for call in calls})
    if unknown:
        logger.warning(
            "rollout %s, attempt %d: lightning.label() named %d responses that are not recorded, such as %.200r: "
            "use the `id` of a reply that the gateway gave to this rollout",
            lease.rollout.id,
            lease.attempt,
            len(unknown),
            unknown[0],
        )


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
