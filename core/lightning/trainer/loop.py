"""The training loop, readable top to bottom.

The invariant: the store's committed steps are the truth. A step is sampled, credited, trained, checkpointed and then
committed; whatever is lost before the commit is done again from the same rollouts, whatever came after it is never undone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from lightning.algorithms.protocol import Algorithm, Batch, needs_critic
from lightning.batch.sample import Sample
from lightning.batch.trajectory import Group
from lightning.engines.protocol import Engine, StepResult
from lightning.errors import AuditError, ConfigError, PolicyServerError, RunnerError
from lightning.plugins import plugins
from lightning.policy_server.protocol import Probe, Update
from lightning.tracking import Trackers
from lightning.trainer.checkpoints import Checkpoints
from lightning.trainer.collect import all_rollouts, batch_digest, count_drift, load_groups, record_step
from lightning.trainer.critic import fresh_values, recorded_values
from lightning.trainer.plan import (
    TRAIN,
    VAL,
    generation,
    is_lost,
    of_generation,
    tasks_of_step,
    train_rollouts,
    val_rollouts,
)
from lightning.trainer.progress import Reporter
from lightning.trainer.stack import Stack
from lightning.trainer.summary import Evaluation, evaluate_rollouts
from lightning.types import Rollout, Status, StepRecord, Task

logger = logging.getLogger(__name__)

PROBE_TOKENS = 96
"""How many tokens of one trained row the policy server must reproduce after each update."""


@dataclass
class Loop:
    """One run of the loop. `done` counts committed steps; the policy's version equals it."""

    stack: Stack
    engine: Engine
    algorithm: Algorithm
    train: Sequence[Task]
    val: Sequence[Task]
    train_agents: Sequence[str]
    reporter: Reporter
    trackers: Trackers
    done: int = 0
    _seconds: dict[str, float] = field(default_factory=dict)
    _probe_ids: Sequence[int] = ()

    @property
    def checkpoints(self) -> Checkpoints:
        """Where training states are kept."""
        return Checkpoints(self.stack.folder / "checkpoints", self.stack.config.trainer.keep_checkpoints)

    async def run(self, started: Mapping[str, float]) -> None:
        """Restore, evaluate, train to the configured number of steps, evaluate, export. `started` is logged as it is."""
        config = self.stack.config.trainer
        await self.restore()
        await self.stack.store.log_metrics(self.stack.run.id, self.done, started)
        self.reporter.begin(self.done, config.steps)
        for step in range(self.done, config.steps):
            if step == 0 or (config.eval_every and step % config.eval_every == 0):
                await self.evaluate()
            began = time.monotonic()
            metrics = await self.step(step)
            self.reporter.step(step, metrics, time.monotonic() - began)
        await self.evaluate()
        await asyncio.to_thread(self.engine.export, self.stack.folder / "model")

    async def step(self, step: int) -> dict[str, float]:
        """Sample the groups of a step, train on them once, and make the policy server serve the result."""
        self._seconds = {}
        with self.timed("rollout"):
            rollouts = await self.sample(step)
        with self.timed("train"):
            self.reporter.phase("training")
            groups = await load_groups(self.stack.store, rollouts, self.train_agents)
            if needs_critic(self.algorithm):
                groups = await self.valued(step, groups)
            batch = self.algorithm.batch(groups)
            result = await asyncio.to_thread(self.engine.step, batch.samples, batch.loss or self.algorithm.loss)
        metrics = step_metrics(rollouts, groups, batch, result)
        metrics["drift_tokens"] = await self.drift(batch, result)
        metrics["tokens_per_second"] = _sampled_tokens(groups) / max(self._seconds["rollout"], 1e-9)
        if metrics["max_logprob_gap"] > self.stack.config.trainer.max_logprob_gap:
            logger.warning("step %d: trainer and sampler differ by %.3g nats", step, metrics["max_logprob_gap"])
        with self.timed("checkpoint"):
            await self.commit(step, groups, batch, metrics)
        with self.timed("update"):
            gap = await self.publish(batch)
        if gap is not None:
            metrics["probe_gap"] = gap
        metrics |= {f"seconds/{phase}": seconds for phase, seconds in self._seconds.items()}
        await self.stack.store.log_metrics(self.stack.run.id, step, metrics)
        self.trackers.log(step, metrics)
        return metrics

    async def valued(self, step: int, groups: Sequence[Group]) -> list[Group]:
        """The groups with what the critic thinks of their states now."""
        return await fresh_values(self.stack.store, self.stack.run.id, step, groups, self.engine.values)

    async def sample(self, step: int) -> list[Rollout]:
        """Run the agent on the tasks of a step; every rollout has ended when this returns."""
        config = self.stack.config
        tasks = tasks_of_step(self.train, step, config.trainer.tasks_per_step, config.trainer.seed)
        size, attempts = self.algorithm.group_size, config.runner.max_attempts
        return await self.execute(
            step,
            TRAIN,
            f"rollouts of step {step + 1}",
            len(tasks) * size,
            lambda number: train_rollouts(self.stack.run.id, step, tasks, size, attempts, generation=number),
        )

    async def execute(
        self, step: int, split: str, what: str, count: int, plan: Callable[[int], list[Rollout]]
    ) -> list[Rollout]:
        """Run what is planned for a step or an evaluation to its end. Raises `RunnerError` when it is lost as a whole."""
        known = await all_rollouts(self.stack.store, self.stack.run.id, split=split, step=step)
        number = generation(known, count)
        self.reporter.phase(what, count)
        await self.stack.execute(plan(number), self.finished)
        known = await all_rollouts(self.stack.store, self.stack.run.id, split=split, step=step)
        rollouts = of_generation(known, number)
        failed = [rollout for rollout in rollouts if rollout.status is Status.FAILED]
        first = _last_line(failed[0].error) if failed else ""
        if failed:
            logger.warning("%s: %d of %d failed; the first: %s", what, len(failed), len(rollouts), first)
        if is_lost(rollouts):
            raise RunnerError(
                f"{what}: all {len(rollouts)} failed, there is nothing to learn from. The first: {first} "
                f"(whole tracebacks: lightning runs show {self.stack.run.id} --failed)"
            )
        return rollouts

    def finished(self, rollout: Rollout) -> None:
        """A rollout has ended for good: tell whoever watches."""
        self.reporter.rollout(rollout)
        self.trackers.finished(rollout)

    async def drift(self, batch: Batch, result: StepResult) -> int:
        """Trained tokens that are not what the store says the policy server sampled (must be 0)."""
        attempts = [(rollout.id, rollout.attempt) for rollout in batch.used]
        calls = [call for calls in await self.stack.store.transitions_of(attempts) for call in calls]
        drift = count_drift(batch, calls, result.seen)
        if drift:
            logger.error("%d trained tokens are not the ones the policy server sampled", drift)
        return drift

    async def commit(self, step: int, groups: Sequence[Group], batch: Batch, metrics: dict[str, float]) -> None:
        """Checkpoint first, then commit: from here on the step is history."""
        due = (step + 1) % self.stack.config.trainer.checkpoint_every == 0
        due = due or step + 1 == self.stack.config.trainer.steps
        folder = self.checkpoints.path(step + 1)
        if due:
            await asyncio.to_thread(self.engine.save, folder)
        checkpoint = folder.name if due else ""
        record = record_step(self.stack.run.id, step, groups, batch, checkpoint=checkpoint, metrics=metrics)
        await self.stack.store.commit_step(record)
        self.done = step + 1
        self.checkpoints.prune(self.done)
        plugins().hook.step_finished(record=record)

    async def publish(self, batch: Batch | None) -> float | None:
        """Give the engine's weights to the policy server as version `done`; return the probe's gap."""
        self.reporter.phase("updating the policy server")
        if batch is not None and batch.samples:
            self._probe_ids = batch.samples[0].ids[:PROBE_TOKENS].tolist()
        folder = self.stack.folder / "weights"
        folder.mkdir(exist_ok=True)
        file = folder / f"version-{self.done:08d}.safetensors"
        await asyncio.to_thread(self.engine.weights, file)
        probe = await asyncio.to_thread(self.probe) if self._probe_ids else None
        update = await self.stack.update(file, self.done, probe)
        self.check_probe(update)
        for old in folder.glob("version-*.safetensors"):
            if old != file:
                old.unlink()
        return update.probe_gap

    def check_probe(self, update: Update) -> None:
        """Raises `PolicyServerError` when the server does not compute with the trainer's weights."""
        limit = self.stack.config.trainer.max_logprob_gap
        if update.probe_gap is not None and not update.probe_gap <= limit:
            raise PolicyServerError(
                f"after the update to version {update.version} the policy server's logprobs differ from the trainer's by "
                f"{update.probe_gap:.3g} nats (trainer.max_logprob_gap is {limit:g}): it does not serve the trained weights. "
                "Nothing is lost; resume the run. If it comes again, compare dtypes (policy_server.dtype, engine.dtype)"
            )

    def probe(self) -> Probe:
        """A few tokens with the trainer's own logprobs."""
        ids = np.asarray(self._probe_ids, dtype=np.int32)
        zeros = np.zeros(len(ids), dtype=np.float32)
        sample = Sample(ids, zeros, zeros, zeros, np.full(len(ids), -1, dtype=np.int32), ())
        return Probe(ids.tolist(), self.engine.logprobs([sample])[0].tolist())

    async def evaluate(self) -> Evaluation | None:
        """Run the agent on every held-out task with the current policy; finished ones are not run again."""
        if not self.val:
            return None
        self._seconds = {}
        run = self.stack.run.id
        attempts, step = self.stack.config.runner.max_attempts, self.done
        known = await all_rollouts(self.stack.store, run, split=VAL, step=step)
        again = known and all(rollout.status in (Status.SUCCEEDED, Status.FAILED) for rollout in known)
        with self.timed("eval"):
            rollouts = await self.execute(
                step,
                VAL,
                f"held-out tasks after {step} steps",
                len(self.val),
                lambda number: val_rollouts(run, step, self.val, attempts, generation=number),
            )
        result = evaluate_rollouts(step, rollouts)
        values = {"eval/failed": float(result.failed)}
        if result.reward is not None:
            values["eval/reward"] = result.reward
        if not again:
            values["seconds/eval"] = self._seconds["eval"]
        await self.stack.store.log_metrics(run, self.done, values)
        self.trackers.log(self.done, values)
        self.reporter.evaluated(result)
        return result

    async def restore(self) -> None:
        """Return to the last committed step: load the newest checkpoint, replay the steps since, serve the result."""
        records = await self.stack.store.list_steps(self.stack.run.id)
        if not records:
            self._refuse_foreign_checkpoints()
            self.checkpoints.discard_after(0)
            if self.stack.config.policy_server.attach or self.stack.policy.version != 0:
                await self.publish(None)  # an attached server serves whatever it was given last
            return
        committed = records[-1].step + 1
        self.checkpoints.discard_after(committed)
        start = self.checkpoints.newest(committed) or 0
        if start:
            await asyncio.to_thread(self.engine.load, self.checkpoints.path(start))
        for record in records[start:]:
            await self.replay(record)
        self.done = committed
        await self.remember_probe(records[-1])
        await self.publish(None)
        self.reporter.say(f"resumed after step {committed} ({committed - start} replayed from the store)")

    def _refuse_foreign_checkpoints(self) -> None:
        if max(self.checkpoints.steps(), default=0) > 1:
            raise ConfigError(
                f"{self.checkpoints.folder} has checkpoints of a run that this store does not know: give the store it was "
                "trained with, or another `out`"
            )

    async def replay(self, record: StepRecord) -> None:
        """Take a committed step again on a fresh engine state, from the store's rows, after checking that they are the same."""
        rollouts = await all_rollouts(self.stack.store, record.run, split=TRAIN, step=record.step)
        groups = await load_groups(self.stack.store, rollouts, self.train_agents)
        if needs_critic(self.algorithm):
            groups = await recorded_values(self.stack.store, record.run, record.step, groups)
        batch = self.algorithm.batch(groups)
        if batch_digest(batch) != record.digest:
            raise AuditError(
                f"step {record.step} of {record.run} cannot be replayed: run `lightning audit {record.run}`"
            )
        await asyncio.to_thread(self.engine.step, batch.samples, batch.loss or self.algorithm.loss)

    async def remember_probe(self, record: StepRecord) -> None:
        """Tokens of one trained call of the last step."""
        for attempt in record.rollouts[:1]:
            for call in (await self.stack.store.transitions_of([attempt]))[0][:1]:
                self._probe_ids = [*call.prompt_ids, *call.response_ids][:PROBE_TOKENS]

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the block's wall seconds to a phase."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.monotonic() - began


def step_metrics(
    rollouts: Sequence[Rollout], groups: Sequence[Group], batch: Batch, result: StepResult
) -> dict[str, float]:
    """The numbers of a step, besides its times."""
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    calls = [len(member.transitions) for group in groups for member in group.trajectories]
    skipped = sum(batch.skipped.values())
    return {
        **result.metrics,
        **{f"skipped/{reason}": float(count) for reason, count in batch.skipped.items()},
        **{f"dropped/{reason}": float(count) for reason, count in batch.dropped.items()},
        "reward": float(np.mean(rewards)) if rewards else 0.0,
        "reward_std": float(np.std(rewards)) if rewards else 0.0,
        "rollouts": float(len(rollouts)),
        "failed": float(sum(rollout.status is Status.FAILED for rollout in rollouts)),
        "groups": float(len(groups)),
        "groups_used": float(len(groups) - skipped),
        "rows": float(len(batch.samples)),
        "calls_per_rollout": float(np.mean(calls)) if calls else 0.0,
    }


def _sampled_tokens(groups: Sequence[Group]) -> int:
    return sum(
        len(call.response_ids) for group in groups for member in group.trajectories for call in member.transitions
    )


def _last_line(error: str) -> str:
    lines = error.strip().splitlines()
    return lines[-1] if lines else "no reason was given"
