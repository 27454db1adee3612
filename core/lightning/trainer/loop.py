"""The training loop, readable top to bottom.

The invariant: the store's committed steps are the truth. A step is sampled, credited, trained, checkpointed and then
committed; whatever is lost before the commit is done again from the same rollouts, whatever came after it is never undone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from lightning.algorithms.protocol import Batch, head_of
from lightning.asyncio_utils import in_thread
from lightning.batch.trajectory import Group
from lightning.engines.protocol import Engine, RevivesWorkers, StepResult
from lightning.errors import ConfigError
from lightning.plugins import plugins
from lightning.runner.protocol import StagedRunner
from lightning.safe_text import counted
from lightning.tracking.trackers import Trackers
from lightning.trainer.algorithm import AlgorithmSchedule
from lightning.trainer.checkpoints import Checkpoints, CheckpointWriter
from lightning.trainer.context import (
    ADDED,
    RESTING,
    STAGES,
    TEACHER,
    Epoch,
    Teacher,
    epoch_at,
    named_stages,
    numeric_context,
    other_stages,
)
from lightning.trainer.metrics import Remarks, UntrainedCalls, UsageMeter, sampled_tokens, staleness, step_metrics
from lightning.trainer.model import earlier_steps, rate_of
from lightning.trainer.plan import VAL, val_rollouts
from lightning.trainer.run_stages import BringForward, RunLine
from lightning.trainer.samplers import Ground, Sampled, Sampler, TurnSampler
from lightning.trainer.stack import Stack
from lightning.trainer.stages import Alarm, StepLine, StepTaken
from lightning.trainer.summary import (
    NAMED,
    Evaluation,
    HeldOut,
    Reporter,
    compared_since,
    evaluate_rollouts,
    evaluations,
)
from lightning.trainer.training_data import all_rollouts, count_drift, fresh_values, of_interest, record_step, without
from lightning.trainer.weight_sync import HELD_SECONDS, Publisher, bound_of
from lightning.types import Json, Rollout, Task

logger = logging.getLogger(__name__)

OTHER_STAGES = (
    "%s are made with other stages than in step %d: %s. For the same ones install the plugins that brought them, and look "
    "at LIGHTNING_DISABLE_PLUGINS and the settings of the section `%s`"
)
SKIPPED = "skipped_nonfinite"
"""A metric of an engine's step, and of each policy of it (`policy/NAME/METRIC`): updates that were not finite."""
SECTIONS = {"calls": "gateway", "attempts": "runner", "steps": "trainer", "groups": "trainer", "runs": "runner"}
"""Of what goes through a line, the section of its settings."""

DIFFER = (
    "step %d: the trainer's logprobs of the tokens that vLLM sampled differ from vLLM's, with the same weights, by %s. "
    "Trainer: %s, vLLM: %s. If both should be alike, start a new run with --set engine.dtype=float32, which vLLM then "
    "computes in, too; if the warning stays, the model is computed differently in the two: compare the versions of vLLM and "
    "transformers. trainer.max_logprob_gap sets a bound of your own"
)


@dataclass
class Loop:
    """One run of the loop. `done` counts committed steps; the policy's version equals it.

    `epochs` are the run's (none: its settings are as it was started); `base` is the digest of the model's folder. `sampler` is
    where groups come from: the core's own samples in turns with training.
    """

    stack: Stack
    engine: Engine
    schedule: AlgorithmSchedule
    train: Sequence[Task]
    val: Sequence[Task]
    train_agents: Sequence[str]
    reporter: Reporter
    trackers: Trackers
    epochs: Sequence[Epoch] = ()
    base: str = ""
    sampler: Sampler = field(default_factory=TurnSampler)
    teacher: Teacher | None = None
    """What the engine has for a reference model, where that is another one than the run began with."""
    stages: StepLine = field(default_factory=StepLine)
    run_line: RunLine = field(default_factory=RunLine)
    bring_forward: BringForward | None = None
    """What takes recorded steps again; none: no step that taught is committed before its checkpoint is on disk."""
    done: int = 0
    kept: Evaluation | None = None
    """The evaluation of the exported model, where the best one's is kept."""
    _seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.epochs = self.epochs or [Epoch(0, 1, self.stack.run.config)]
        default = 1 if isinstance(self.engine, RevivesWorkers) else None
        self.publisher = Publisher(self.stack, self.engine)
        self.writer = CheckpointWriter(
            self.checkpoints, self.engine.save, self.stack.config.trainer.checkpoint_every or default
        )
        self.remarks, self.usage = Remarks(), UsageMeter(self.stack.servers)
        self.untrained = UntrainedCalls(self.stack.store, self.stack.run.id)
        self.held_out = HeldOut(self.stack.folder, compared_since(self.epochs))

    @property
    def checkpoints(self) -> Checkpoints:
        """Where training states are kept."""
        return Checkpoints(self.stack.folder / "checkpoints", self.stack.config.trainer.keep_checkpoints)

    @property
    def lines(self) -> dict[str, Mapping[str, str]]:
        """The stages of plugins that stand in a line of this run, with their versions, by what goes through it: attempts, where
        they are made beside the trainer."""
        runner = self.stack.runner
        around = {"attempts": runner.stages} if isinstance(runner, StagedRunner) else {}
        return {
            "calls": self.stack.gateway.stages,
            **around,
            "steps": self.stages.versions,
            "groups": self.sampler.versions,
            "runs": self.run_line.versions,
        }

    async def run(self, started: Mapping[str, float]) -> Evaluation | None:
        """Restore, evaluate, train to the configured number of steps, evaluate, export. `started` is logged as it is. Returns
        the evaluation whose model was exported, where `trainer.keep` is `best`."""
        config, warmup = self.stack.config.trainer, self.stack.config.engine.warmup_steps
        if warmup > earlier_steps(self.stack.run.config) + config.steps:
            logger.warning(
                "engine.warmup_steps = %d is more than trainer.steps = %d: the learning rate never comes up to engine.lr",
                warmup,
                config.steps,
            )
        sampler = self.sampling()
        await self.restore()
        await self.stack.store.log_metrics(self.stack.run.id, self.done, started)
        self.reporter.begin(self.done, config.steps)
        async with self.writer, self.stages, sampler:
            due = await self.evaluation_begun()
            for step in range(self.done + 1, config.steps + 1):
                if why := self.stages.ends():
                    self.reporter.say(f"stopped after step {self.done}: {why}")
                    break
                if due or self.done == 0 or (config.eval_every and self.done % config.eval_every == 0):
                    await self.evaluate()
                    if self.held_out.is_over(config.patience):
                        break
                due, began = False, time.monotonic()
                metrics = await self.step(step)
                self.reporter.step(step, metrics, time.monotonic() - began)
            else:
                await self.evaluate()
            await self.writer.finish()
        return await self.export()

    async def export(self) -> Evaluation | None:
        """Write the run's model. Returns the evaluation that it is of, where the best one's is kept."""
        self.reporter.phase("writing the model")
        model, best = self.stack.folder / "model", self.held_out.best
        early = self.done < self.stack.config.trainer.steps
        if best is not None and early and self.held_out.is_over(self.stack.config.trainer.patience):
            self.reporter.say(
                f"ended after {counted(self.done, 'step')}: "
                f"{counted(self.stack.config.trainer.patience, 'evaluation was', 'evaluations in a row were')} no better than "
                f"that after {counted(best.step, 'step')} (trainer.patience)"
            )
        keeps = self.stack.config.trainer.keep == "best"
        self.kept = await asyncio.to_thread(self.held_out.deliver, model) if keeps else None
        if self.kept is None:
            await asyncio.to_thread(self.engine.export, model)
        else:
            self.reporter.say(
                f"kept the model of the best evaluation: after {counted(self.kept.step, 'step')}, held-out reward "
                f"{self.kept.score:.3f}"
            )
        return self.kept

    def sampling(self) -> Sampler:
        """The sampler, with what it works with."""
        agents, reporter = self.train_agents, self.reporter
        ground = Ground(self.stack, self.schedule, self.train, agents, reporter, self.finished, self.epochs)
        return self.sampler.begin(ground)

    async def step(self, step: int) -> dict[str, float]:
        """Sample the groups of a step, train on them once, and make the policy server serve the result."""
        self.begin_step()
        algorithm = self.schedule.at(step)
        with self.timed("rollout"):
            sampled = await self.sampler.sample(step)
        with self.timed("checkpoint"):
            self.reporter.phase("waiting for the last checkpoint to be written")
            await self.writer.training()
        with self.timed("train"):
            self.reporter.phase("training")
            groups = of_interest(sampled.groups, self.agents_at(step)) if self.resting(step) else sampled.groups
            async with self.stack.resting():
                if head_of(algorithm):
                    groups = await fresh_values(self.stack.store, self.stack.run.id, step, groups, self.engine.values)
                batch = await in_thread(algorithm.batch, groups)  # a judge may be asked for minutes
                loss = batch.loss_for(algorithm)
                result = await asyncio.to_thread(self.engine.step, batch.samples, loss, self.rate(step))
        return await self.take(step, sampled, groups, batch, result)

    def resting(self, step: int) -> Sequence[str]:
        """The policies that a step does not train; empty in a run with one."""
        several = plugins().policy_set(self.stack.config)
        return several.resting(step) if several else ()

    def agents_at(self, step: int) -> tuple[str, ...]:
        """The globs of the calls that a step trains."""
        return (*self.train_agents, *without(self.resting(step)))

    def rate(self, step: int) -> float:
        """The learning rate of a step by the schedule of the settings."""
        return rate_of(self.stack.config, self.stack.run.config, step)

    async def take(
        self,
        step: int,
        sampled: Sampled,
        groups: Sequence[Group],
        batch: Batch,
        result: StepResult,
        said: Mapping[str, Json] | None = None,
        digest: str = "",
        extras: Mapping[str, bytes] | None = None,
    ) -> dict[str, float]:
        """Commit a step that the engine has taken, and make the policy server serve the result; returns its metrics. `sampled`
        is what is new. A loop that takes steps otherwise than this one says how in `said`, for the step's context, and by a
        `digest` of what it did, for the record in place of the batch's; `extras` are what it keeps with the step."""
        metrics = step_metrics(sampled.rollouts, groups, batch, result, resting=self.resting(step))
        metrics |= staleness(step - 1, batch) | sampled.metrics
        metrics |= await self.usage.step(groups) | await self.untrained.step(groups)
        metrics["drift_tokens"] = self.drift(groups, batch, result)
        metrics["tokens_per_second"] = sampled_tokens(sampled.groups) / max(sampled.seconds, 1e-9)
        fresh = not metrics.get("staleness_max") and not sampled.elsewhere  # other weights differ, as they should
        if fresh and (gap := bound_of(self.stack.config).problem_of_step(metrics)):
            computed = self.stack.config
            logger.warning(DIFFER, step, gap, computed.engine.dtype, computed.policy_server.dtype)
        await asyncio.to_thread(self.remarks.step, step, groups, batch, metrics, self.train_agents)
        parts = self.stack.gateway.parts
        taken = StepTaken(step, sampled.rollouts, groups, batch, metrics, self.train_agents, parts)
        added = await self.stages.taken(taken)
        metrics |= added.metrics
        self.alarm(f"step {step}", step, added.alarms)
        taught = bool(result.metrics.get("stepped", 1.0))
        with self.timed("checkpoint"):
            context = await self.context(step, result)
            context |= {ADDED: added.context} if added.context else {}
            context |= said or {}
            await self.commit(step, groups, batch, metrics, context, digest, extras or {}, taught=taught)
        with self.timed("update"):
            self.publisher.prober.remember(batch, {} if sampled.elsewhere else metrics)
            metrics |= await self.publish(taught=taught)
        self.writer.committed(self.done, taught=taught, seconds=self._seconds["train"])
        await self.sampler.committed(self.done, sampled.rollouts)
        metrics |= {f"seconds/{phase}": seconds for phase, seconds in self._seconds.items()}
        metrics[HELD_SECONDS] = self.publisher.held
        await self.stack.store.log_metrics(self.stack.run.id, step, metrics)
        self.trackers.log(step, metrics)
        return metrics

    def begin_step(self) -> None:
        """Count the seconds of a step, or of an evaluation, from here on."""
        self._seconds = {}

    def alarm(self, when: str, step: int, alarms: Sequence[Alarm]) -> None:
        """Say what the stages found, and tell who wants to know of what is serious."""
        for alarm in alarms:
            logger.warning("%s: %s", when, alarm.text)
            if alarm.serious:
                told: dict[str, Json] = {"run": self.stack.run.id, "step": step, **alarm.to_json()}
                self.stages.alarmed(told)
                self.trackers.alert(told)

    async def context(self, step: int, result: StepResult) -> dict[str, Json]:
        """How the step was computed, for its record."""
        settings = self.stack.config.engine.model_dump(mode="json")
        epoch, served = epoch_at(self.epochs, step).number, await self.publisher.digest() or self.base
        numeric = numeric_context(self.engine, settings, result.metrics)
        named: dict[str, Json] = {"epoch": epoch, "weights": served, "base": self.base}
        named |= {TEACHER: self.teacher.described()} if self.teacher else {}
        named |= {RESTING: list(resting)} if (resting := self.resting(step)) else {}
        named[STAGES] = named_stages(self.lines)
        return named | numeric

    def finished(self, rollout: Rollout) -> None:
        """A rollout has ended for good: tell whoever watches."""
        self.reporter.rollout(rollout)
        self.trackers.finished(rollout)

    def drift(self, groups: Sequence[Group], batch: Batch, result: StepResult) -> int:
        """Trained tokens that are not what the store says the policy server sampled (must be 0, as of a skipped step, and of a
        policy whose update was skipped). `groups` are as they were read from the store: nobody can write to their token
        arrays."""

        def skipped(policy: str) -> bool:
            return bool(result.metrics.get(f"policy/{policy}/{SKIPPED}", result.metrics.get(SKIPPED)))

        batch = replace(batch, samples=tuple(row for row in batch.samples if not skipped(row.policy)))
        calls = [call for group in groups for member in group.trajectories for call in member.transitions]
        drift = count_drift(batch, calls, result.seen)
        if drift:
            logger.error("%d trained tokens are not the ones the policy server sampled", drift)
        return drift

    async def commit(
        self,
        step: int,
        groups: Sequence[Group],
        batch: Batch,
        metrics: dict[str, float],
        context: dict[str, Json],
        digest: str,
        extras: Mapping[str, bytes],
        *,
        taught: bool,
    ) -> None:
        """From here on the step is history. The last one is saved before, and so is one that nothing could take again, such as
        one with a `digest` of its own; others are saved beside what comes next."""
        last = step == self.stack.config.trainer.steps and (taught or self.writer.unsaved)
        if last or (taught and (digest or self.bring_forward is None)):
            await self.writer.write(step)
        checkpoint = self.checkpoints.path(self.writer.newest).name if self.writer.newest else ""
        record = record_step(
            self.stack.run.id,
            step,
            groups,
            batch,
            digest,
            checkpoint=checkpoint,
            metrics=metrics,
            context=context,
            extras=extras,
        )
        await self.stack.store.commit_step(record)
        self.done = step
        plugins().hook.step_finished(record=record)
        await asyncio.to_thread(self.checkpoints.prune, self.done)

    async def publish(self, *, taught: bool = True) -> dict[str, float]:
        """Give the engine's weights to the policy server as version `done`; return the probe's metrics. After a step that
        taught nothing it has them: they only get that version."""
        if not taught:
            await self.publisher.relabel(self.done)
            return {}
        self.reporter.phase("updating the policy server")
        return await self.publisher.publish(self.done)

    async def evaluation_begun(self) -> bool:
        """Whether an interrupted evaluation of the present policy has to be brought to its end, due or not."""
        known = await all_rollouts(self.stack.store, self.stack.run.id, split=VAL, step=self.done)
        return any(not rollout.status.ended for rollout in known)

    async def evaluate(self) -> Evaluation | None:
        """Run the agent on every held-out task with the current policy; finished ones are not run again."""
        if not self.val:
            return None
        self.begin_step()
        run = self.stack.run.id
        attempts, step = self.stack.config.runner.max_attempts, self.done
        known = await all_rollouts(self.stack.store, run, split=VAL, step=step)
        ended = {rollout.id for rollout in known if rollout.status.ended}
        with self.timed("eval"):
            rollouts = await self.sampler.execute(
                lambda number: val_rollouts(run, step, self.val, attempts, generation=number),
                f"held-out tasks after {counted(step, 'step')}",
            )
        result = evaluate_rollouts(step, rollouts)
        values = {"eval/failed": float(result.failed)}
        values |= {f"eval/{NAMED}{name}": value for name, value in result.rewards.items()}
        if result.reward is not None:
            values["eval/reward"] = result.reward
        if result.reward_with_failures is not None:
            values["eval/reward_with_failures"] = result.reward_with_failures
        fresh = any(rollout.id not in ended for rollout in rollouts)
        if fresh:
            values["seconds/eval"] = self._seconds["eval"]
        await self.stack.store.log_metrics(run, self.done, values)
        self.trackers.log(self.done, values)
        self.reporter.evaluated(result)
        self.held_out.add([result], fresh=fresh)
        self.alarm(f"after {counted(step, 'step')}", step, await self.stages.evaluated(self.held_out.results))
        if self.stack.config.trainer.keep == "best" and result in self.held_out.results:
            await asyncio.to_thread(self.held_out.keep, result, self.engine.export)
        return result

    async def restore(self) -> None:
        """Return to the last committed step: load the newest checkpoint, take the steps since again, serve the result. Where
        nothing takes steps again, those since have taught nothing.

        The checkpoint of step 0 is what another run had from which this one was forked.
        """
        records = await self.stack.store.steps(self.stack.run.id)
        known = await evaluations(self.stack.store, self.stack.run.id)
        self.held_out.add(known)
        if len(self.held_out.results) < len(known):
            self.reporter.say(
                f"held-out tasks, or how they are sampled, changed after step {self.held_out.since}: evaluations before it are "
                "not compared with later ones"
            )
        await self.stages.begin([record.metrics for record in records], self.held_out.results)
        committed = records[-1].step if records else 0
        if not records:
            self._refuse_foreign_checkpoints()
        self.checkpoints.discard_after(committed)
        saved = self.checkpoints.newest(committed)
        start = saved or 0
        if saved is not None:
            await asyncio.to_thread(self.engine.load, self.checkpoints.path(saved))
        if not records:
            old = any(server.version != 0 for server in self.stack.servers)
            if saved is not None or self.stack.config.policy_server.attach or old:
                await self.publish()  # an attached server serves whatever it was given last
            return
        for of, other in other_stages(records[-1].context, self.lines).items():
            logger.warning(OTHER_STAGES, of, committed, other, SECTIONS[of])
        again = records[start:] if self.bring_forward else []
        if self.bring_forward and again:
            async with self.stack.resting():  # as when they were taken: with less memory they would be cut otherwise
                await self.bring_forward(self.engine, again)
        self.done = committed
        self.writer.restored(start, committed)
        await self.publisher.recall(records[-1], self.train_agents)
        await self.publish()
        self.reporter.say(f"resumed after step {committed} ({len(again)} replayed from the store)")

    def _refuse_foreign_checkpoints(self) -> None:
        if max(self.checkpoints.steps(), default=0) > 1:
            raise ConfigError(
                f"{self.checkpoints.folder} has checkpoints of a run that this store does not know: give the store it was "
                "trained with, or another `out`"
            )

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the block's wall seconds to a phase."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.monotonic() - began
