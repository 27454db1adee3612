"""A training loop of your own: everything that a run needs is open, and each part of a step is a call.

    trainer = lightning.Trainer(model, "grpo", out="runs/mine")
    async with trainer.session(agent) as session:
        for _ in range(40):
            groups = await session.rollout(tasks, n=8)
            batch = await session.batch(groups)
            await session.forward_backward(batch)
            await session.optim_step(lr=1e-5)
            await session.publish()

The invariant: what such a loop leaves is a run as any other. A step has one batch, of rollouts that no other step has, and may
hold several updates on it; it is on disk before it is committed, and `lightning audit` derives its batch again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from lightning.algorithms.protocol import Batch, needs_critic
from lightning.asyncio_utils import in_thread
from lightning.batch.sample import Sample
from lightning.batch.trajectory import Group
from lightning.engines.protocol import Engine, StepResult
from lightning.errors import ConfigError, DataError
from lightning.store.protocol import Store
from lightning.trainer.loop import Loop
from lightning.trainer.plan import TRAIN, as_tasks, newest_generation, train_rollouts
from lightning.trainer.rollout_collection import Sampled
from lightning.trainer.summary import Evaluation
from lightning.trainer.training_data import all_rollouts, load_groups
from lightning.types import Json, Rollout, Task


@dataclass
class _Step:
    """What the step that is being made has so far. `first` is the number of its next group, `generation` which try it is."""

    generation: int
    first: int = 0
    rollouts: list[Rollout] = field(default_factory=list)
    seconds: float = 0.0
    batch: Batch | None = None
    gradients: list[StepResult] = field(default_factory=list)
    updates: list[StepResult] = field(default_factory=list)


class Session:
    """An open run; `Trainer.session` makes it. `step` counts the committed steps, which is the policy's version, too."""

    def __init__(self, loop: Loop) -> None:
        if any(needs_critic(algorithm) for _, algorithm in loop.schedule.phases):
            raise ConfigError(
                "a critic is trained by Trainer.fit alone: choose a credit without one for a loop of your own"
            )
        self._loop = loop
        self._now: _Step | None = None
        self._groups: dict[int, tuple[Batch, Sequence[Group]]] = {}
        """Batches by their identity, with what they are of."""
        self._trained: set[str] = set()

    async def __aenter__(self) -> Self:
        loop = self._loop
        await loop.restore()
        await loop.writer.__aenter__()
        await loop.alerts.__aenter__()
        loop.sampler = loop.sampling()
        await loop.sampler.__aenter__()
        loop.reporter.begin(loop.done, loop.stack.config.trainer.steps)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loop = self._loop
        await loop.sampler.__aexit__(kind, error, trace)
        await loop.alerts.__aexit__(kind, error, trace)
        if error is None:
            await loop.writer.finish()
            await loop.export()
        await loop.writer.__aexit__(kind, error, trace)

    @property
    def step(self) -> int:
        """How many steps are committed."""
        return self._loop.done

    @property
    def engine(self) -> Engine:
        """What holds the weights. Its methods block: call them in a thread."""
        return self._loop.engine

    @property
    def store(self) -> Store:
        """Where everything is recorded."""
        return self._loop.stack.store

    async def rollout(self, tasks: Sequence[Task | Json], n: int | None = None) -> list[Group]:
        """Run the agent `n` times (default: the algorithm's group size) on each task, by the present policy. May be called
        several times in a step. Raises `RunnerError` when all fail; some that fail are in the record and in no group."""
        loop, now, began = self._loop, await self._present(), time.monotonic()
        given = as_tasks(tasks, "tasks")
        if not given:
            raise DataError("the list of tasks is empty: give rollout() at least one")
        size = loop.schedule.at(loop.done).group_size if n is None else n
        if size < 1:
            raise DataError(f"n = {size}: a group has at least one rollout")
        attempts = loop.stack.config.runner.max_attempts
        planned = train_rollouts(
            loop.stack.run.id, loop.done, given, size, attempts, generation=now.generation, first=now.first
        )
        now.first += len(given)
        what = f"rollouts of step {loop.done + 1}"
        with loop.timed("rollout"):
            ended = await loop.sampler.ended(planned, what)
        loop.sampler.check(what, ended)
        now.rollouts += ended
        now.seconds += time.monotonic() - began
        return await load_groups(self.store, ended, loop.train_agents, loop.stack.config.trainer.policy_fault)

    async def batch(self, groups: Sequence[Group]) -> Batch:
        """The rows of groups, as the run's algorithm makes them: credit, filtering, weights. Raises `DataError` for groups of
        which a rollout was trained already, or that are older than `trainer.max_staleness` steps."""
        self._check_groups(groups)
        batch = await in_thread(self._loop.schedule.at(self.step).batch, groups)
        self._groups[id(batch)] = (batch, groups)
        return batch

    async def forward_backward(self, batch: Batch, samples: Sequence[Sample] | None = None) -> Mapping[str, float]:
        """Add the gradient of a batch of this session, or of some of its rows (a mini-batch, whose weights you may scale);
        returns what the engine measured. Raises `DataError` for another batch in one step."""
        loop, now = self._loop, await self._present()
        if id(batch) not in self._groups:
            raise DataError("this batch was not made by session.batch(), so nothing says which rollouts it is of")
        if now.batch is not None and now.batch is not batch:
            raise DataError("a step has one batch, on which it may take several updates: publish() before another one")
        rows = batch.samples if samples is None else samples
        if not rows:
            left_out = ", ".join(f"{count} x {why}" for why, count in batch.skipped.items()) or "no groups were given"
            raise DataError(
                f"the batch has no row to train on ({left_out}): sample other tasks, and make another batch"
            )
        if now.batch is None:
            await loop.writer.training()
            now.batch = batch
        loss = batch.loss_for(loop.schedule.at(loop.done))
        with loop.timed("train"):
            async with loop.stack.resting():
                result = await asyncio.to_thread(loop.engine.forward_backward, rows, loss)
        now.gradients.append(result)
        return result.metrics

    async def optim_step(self, lr: float | None = None) -> Mapping[str, float]:
        """Clip the gradient and update, at this rate or that of the schedule. Raises `DataError` without a gradient."""
        loop, now = self._loop, await self._present()
        if not now.gradients:
            raise DataError("there is no gradient: call forward_backward() with a batch before optim_step()")
        with loop.timed("train"):
            async with loop.stack.resting():
                result = await asyncio.to_thread(loop.engine.optim_step, lr)
        now.updates.append(result)
        return result.metrics

    async def publish(self) -> Mapping[str, float]:
        """Commit the step and make the policy server serve its weights; returns the step's metrics. Raises `DataError` when
        nothing was updated since the last one."""
        loop, now, began = self._loop, await self._present(), time.monotonic()
        if now.batch is None or not now.updates:
            raise DataError(
                "nothing was updated since the last publish(): call forward_backward() and optim_step() before"
            )
        _, groups = self._groups[id(now.batch)]
        sampled = Sampled(now.rollouts, groups, now.seconds)
        metrics = await loop.take(loop.done, sampled, groups, now.batch, _summed(now))
        self._trained |= {rollout.id for rollout in now.batch.used}
        self._now, self._groups = None, {}
        loop.reporter.step(loop.done - 1, metrics, time.monotonic() - began)
        return metrics

    async def evaluate(self) -> Evaluation | None:
        """Run the agent on the held-out tasks of `Trainer.session`, between two steps; None without such. Raises `DataError`
        for a step that has a gradient, whose weights are nobody's yet."""
        if self._now is not None and self._now.gradients:
            raise DataError("the policy server has not the weights of this step yet: publish() before evaluate()")
        return await self._loop.evaluate()

    async def _present(self) -> _Step:
        """The step that is being made. One that was interrupted is begun anew: its rollouts stay in the record."""
        if self._now is None:
            known = await all_rollouts(self.store, self._loop.stack.run.id, split=TRAIN, step=self.step)
            self._now = _Step(newest_generation(known) + 1 if known else 0)
            self._loop.begin_step()
        return self._now

    def _check_groups(self, groups: Sequence[Group]) -> None:
        bound = self._loop.stack.config.trainer.max_staleness
        for rollout in (member.rollout for group in groups for member in group.trajectories):
            if rollout.id in self._trained or rollout.trained_at_step is not None:
                raise DataError(
                    f"{rollout.id} was trained in a step before: each rollout is in one step, which may take several updates"
                )
            if self.step - rollout.step > bound:
                raise DataError(
                    f"{rollout.id} was sampled {self.step - rollout.step} steps ago, and trainer.max_staleness is {bound}: "
                    "raise that to train on older rollouts"
                )


def _summed(step: _Step) -> StepResult:
    """What a step reports: of its first pass over the rows, as far as gradients were added before the first update."""
    seen = {key: value for result in step.gradients for key, value in result.seen.items()}
    metrics = dict(step.gradients[0].metrics)
    for name in ("grad_norm", "critic_grad_norm"):
        values = [update.metrics[name] for update in step.updates if name in update.metrics]
        metrics |= {name: sum(values) / len(values)} if values else {}
    taken = sum(update.metrics["updates"] for update in step.updates)
    return StepResult(
        metrics
        | {
            "updates": taken,
            "stepped": 1.0,
            "lr": step.updates[-1].metrics["lr"],
            "passes": float(len(step.gradients)),
        },
        seen,
    )
