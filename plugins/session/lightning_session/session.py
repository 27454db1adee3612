"""A training loop of your own: everything that a run needs is open, and each part of a step is a call.

    trainer = lightning.Trainer(model, "grpo", out="runs/mine")
    async with trainer.session(agent) as session:
        for _ in range(40):
            groups = await session.rollout(tasks, n=8)
            batch = await session.batch(groups)
            await session.forward_backward(batch)
            await session.optim_step(lr=1e-5)
            await session.publish()

The invariant: such a loop leaves a run like any other. A step has one batch and may take several updates on it. Its rollouts
are in no other step, except those that its record declares as reused (`trainer.max_reuse`). A step is on disk before it is
committed, and `lightning audit` derives its batch again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Self

from lightning.algorithms.protocol import Batch
from lightning.asyncio_utils import in_thread
from lightning.batch import Group, Sample
from lightning.config import Config
from lightning.engines.protocol import Engine, StepResult
from lightning.errors import ConfigError, DataError
from lightning.losses.protocol import check_updates
from lightning.safe_text import counted
from lightning.store.protocol import Store
from lightning.store.rollout_state import REUSE
from lightning.trainer.algorithm import AlgorithmSchedule
from lightning.trainer.context import RESTING
from lightning.trainer.loop import Loop
from lightning.trainer.plan import TRAIN, as_tasks, fixed_order, newest_generation, train_rollouts
from lightning.trainer.samplers import Sampled
from lightning.trainer.summary import Evaluation, check_held_out
from lightning.trainer.training_data import all_rollouts, load_groups, of_interest, without
from lightning.types import POLICY, Json, Rollout, Task, Transition
from lightning_branching.planned import branch_rollouts, warn_of_credit
from lightning_proof.recorded_step import OWN_LOOP, OwnStep, row_digests, rows_digest

from lightning_session.policies import SessionPolicy, others, policies_of

if TYPE_CHECKING:
    from lightning import Trainer

logger = logging.getLogger(__name__)


@dataclass
class _Step:
    """The state of the step that is being made. `first` is the number of its next group, `generation` counts the tries of this
    step. `result` is the engine's result for its rows up to the first update, `pending` says whether there is a gradient,
    `rows` are the rows that updates have used."""

    generation: int
    first: int = 0
    rollouts: list[Rollout] = field(default_factory=list)
    next_index: dict[str, int] = field(default_factory=dict)
    """The number of the next branch of a group, for groups with branches."""
    seconds: float = 0.0
    batch: Batch | None = None
    result: StepResult | None = None
    pending: bool = False
    rows: set[int] = field(default_factory=set)
    given: list[tuple[int, tuple[str, str]]] = field(default_factory=list)
    """The rows of the present gradient: the place of each in the batch, and its digests when it was given."""
    updates: list[StepResult] = field(default_factory=list)
    computed: list[tuple[float, str]] = field(default_factory=list)
    """For each update its learning rate, and the digest of the rows that it was computed on."""


@dataclass(frozen=True)
class _Made:
    """A batch that `Session.batch` made, its groups, and the digests of its rows when it was made."""

    batch: Batch
    groups: Sequence[Group]
    rows: Sequence[tuple[str, str]]
    resting: Sequence[str] | None
    """The policies that were left out by name; None if none were named."""


class Session:
    """An open run; `Trainer.session` makes it. `step` counts the committed steps, which is the policy's version, too. Its calls
    wait for one another."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._now: _Step | None = None
        self._groups: dict[str, Group] = {}
        """The groups that `rollout` has returned, until they were in as many steps as they may be, or are too old."""
        self._taken = Counter[str]()
        """For each group the number of steps that it was in."""
        self._trained: set[str] = set()
        """The rollouts of `_groups` that were trained in a step."""
        self._batches: dict[int, _Made] = {}
        """The batches of this step, by their identity."""
        self._branched = False
        """Whether `branch` was called."""
        self._turn = asyncio.Lock()
        self._policies = policies_of(loop, self._turn)
        self._resources = AsyncExitStack()

    async def __aenter__(self) -> Self:
        loop = self._loop
        async with AsyncExitStack() as opened:
            sampler = loop.sampling()
            await loop.restore()
            await opened.enter_async_context(loop.writer)
            await opened.enter_async_context(loop.stages)
            await opened.enter_async_context(sampler)
            loop.reporter.begin(loop.done, loop.stack.config.trainer.steps)
            self._resources = opened.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        async with self._resources:
            if error is not None:
                raise error  # so that everything that was opened is told of it
            if self._now is not None and self._now.updates:
                raise DataError("the last updates are in no step: publish() before the session ends")
            await self._loop.writer.finish()
            await self._loop.export()

    @property
    def step(self) -> int:
        """How many steps are committed."""
        return self._loop.done

    @property
    def policies(self) -> Mapping[str, SessionPolicy]:
        """The policies of the run by name; `{"policy": ...}` for a run with one."""
        return self._policies

    @property
    def kept(self) -> Evaluation | None:
        """The evaluation of the exported model, if `trainer.keep` is `best`."""
        return self._loop.kept

    @property
    def engine(self) -> Engine:
        """The engine that holds the weights. Its methods block: call them in a thread."""
        return self._loop.engine

    @property
    def store(self) -> Store:
        """The store that records everything."""
        return self._loop.stack.store

    async def rollout(self, tasks: Sequence[Task | Json], n: int | None = None) -> list[Group]:
        """Run the agent `n` times (default: the algorithm's group size) on each task, by the present policy. May be called
        several times in a step. Raises `RunnerError` when all fail; otherwise rollouts that fail are in the record and in no
        group."""
        given, loop = as_tasks(tasks, "tasks"), self._loop
        if not given:
            raise DataError("the list of tasks is empty: give rollout() at least one")
        if n is not None and n < 1:
            raise DataError(f"n = {n}: a group has at least one rollout")
        async with self._turn:
            now, began = await self._present(), time.monotonic()
            size = loop.schedule.at(self.step + 1).group_size if n is None else n
            attempts = loop.stack.config.runner.max_attempts
            planned = train_rollouts(
                loop.stack.run.id, self.step + 1, given, size, attempts, generation=now.generation, first=now.first
            )
            now.first += len(given)
            what = f"rollouts of step {self.step + 1}"
            with loop.timed("rollout"):
                ended = await loop.sampler.ended(planned, what)
            loop.sampler.check(what, ended)
            now.rollouts += ended
            now.seconds += time.monotonic() - began
            fault = loop.stack.config.trainer.policy_fault
            found = await load_groups(self.store, ended, loop.agents_at(self.step + 1), fault)
            self._groups |= {group.id: group for group in found}
            return found

    async def branch(self, group: Group, at: Transition, n: int = 8) -> Group:
        """Run the agent `n` more times from a call of one of the group's rollouts on: earlier calls are answered from the
        record, the others are sampled. Return the group with those branches that are valid, which replaces the given one; a
        warning tells of the others. Raises `DataError` for a group of another step, or a call from which none can start."""
        if n < 1:
            raise DataError(f"n = {n}: give the number of branches, 1 or more")
        async with self._turn:
            now, loop = await self._present(), self._loop
            trunk = next((member for member in group.trajectories if member.rollout.id == at.rollout), None)
            if trunk is None or self._groups.get(group.id) is not group or trunk.rollout.step != self.step + 1:
                raise DataError(f"{group.id} is no group of this step's rollout() that has the call {at.key}")
            (one,) = branch_rollouts([(trunk, at)], 0)
            await loop.stack.gateway.parts.line.planned(one)
            self._forget_batches_of(group, now)
            highest = max(member.index for member in now.rollouts if member.group == group.id)
            first = max(highest + 1, now.next_index.get(group.id, 0))
            now.next_index[group.id] = first + n  # also if this is interrupted: an id never belongs to two calls
            planned = branch_rollouts([(trunk, at)] * n, first)
            del self._groups[
                group.id
            ]  # interrupted, its branches stand in the store, and it is trained with them or not at all
            what, began = f"branches of step {self.step + 1}", time.monotonic()
            with loop.timed("rollout"):
                ended = await loop.sampler.ended(planned, what)
            known = {rollout.id for rollout in now.rollouts}
            branches = [rollout for rollout in ended if rollout.id not in known]
            loop.sampler.tell_failed(what, branches)
            now.rollouts += branches
            now.seconds += time.monotonic() - began
            fault, agents = loop.stack.config.trainer.policy_fault, loop.agents_at(self.step + 1)
            (found,) = await load_groups(self.store, ended, agents, fault)
            self._groups[group.id] = found
            self._warn_of_credit()
            return found

    def _forget_batches_of(self, group: Group, now: _Step) -> None:
        """Drop the batches of a group that is about to change. Raises `DataError` if one of them is being trained on."""
        for name, made in list(self._batches.items()):
            if any(each.id == group.id for each in made.groups):
                if now.batch is made.batch and (now.updates or now.pending):
                    raise DataError(f"{group.id} is in the batch that this step trains on: branch before that")
                del self._batches[name]

    def _warn_of_credit(self) -> None:
        if not self._branched:
            self._branched = True
            warn_of_credit((self._loop.schedule.at(self.step + 1),))

    async def batch(self, groups: Sequence[Group], policies: Sequence[str] | None = None) -> Batch:
        """Make the rows of groups, as the run's algorithm makes them: credit, filtering, weights. With `policies` the step
        trains these of the run's policies alone: the batch has the rows of their calls, and the others rest.

        Raises `DataError` for groups that `rollout` has not returned like this, that were in more steps than
        `trainer.max_reuse` allows, or that are older than `trainer.max_staleness` steps, and for names that are not those of
        trained policies."""
        resting = None if policies is None else others(self.policies, policies)
        trainer = self._loop.stack.config.trainer
        if len({group.id for group in groups}) < len(groups):
            raise DataError("a group is there twice: give each once")
        for group in groups:
            if (taken := self._taken[group.id]) > trainer.max_reuse:
                raise DataError(
                    f"{group.id} was trained in a step before ({taken} in all), and trainer.max_reuse = {trainer.max_reuse} is "
                    "in how many steps beyond its first it may be: set trainer.max_reuse for a replay buffer, or sample others"
                )
            if self._groups.get(group.id) is not group:
                raise DataError(
                    f"{group.id} is no group of rollout() that can be trained: it is older than "
                    f"trainer.max_staleness = {trainer.max_staleness} steps, was changed, or branch() was interrupted on it"
                )
        async with self._turn:
            if resting is not None:
                groups = of_interest(groups, (*self._loop.train_agents, *without(resting)))
            batch = await in_thread(self._loop.schedule.at(self.step + 1).batch, groups)
            rows = await asyncio.to_thread(lambda: [row_digests(row) for row in batch.samples])
            self._batches[id(batch)] = _Made(batch, [*groups], rows, resting)
            return batch

    async def forward_backward(self, batch: Batch, samples: Sequence[Sample] | None = None) -> Mapping[str, float]:
        """Add the gradient of a batch of this session, or of some of its rows. Return the metrics of all rows since the last
        update. You may change weights and advantages: the step's record then says that its rows were changed. Raises
        `DataError` for another batch in a step that has updates, and for rows that are not the batch's; `ConfigError` for a
        loss that several updates, or parts of a batch, would change."""
        async with self._turn:
            loop, now = self._loop, await self._present()
            if id(batch) not in self._batches:
                raise DataError("this batch was not made by session.batch() in this step: make one of the groups")
            if now.batch is not batch and now.batch is not None and (now.updates or now.pending):
                raise DataError(
                    "a step has one batch, on which it may take several updates: publish() before another one"
                )
            rows = batch.samples if samples is None else tuple(samples)
            if not rows:
                left_out = ", ".join(f"{count} x {why}" for why, count in batch.skipped.items()) or "no group was given"
                raise DataError(
                    f"the batch has no row to train on ({left_out}): sample other tasks, make another batch"
                )
            loss = batch.loss_for(loop.schedule.at(self.step + 1))
            check_updates(loss, several=bool(now.updates), parts=samples is not None)
            given = await asyncio.to_thread(_given, rows, self._batches[id(batch)])
            await loop.writer.training()
            if now.batch is not batch:
                now.batch, now.rows = batch, set()
            before, now.given, now.pending = now.given if now.pending else [], [], False
            with loop.timed("train"):
                async with loop.stack.resting():
                    result = await asyncio.to_thread(loop.engine.forward_backward, rows, loss)
            now.pending, now.given = True, before + given
            if not now.updates:
                now.result = result
            return result.metrics

    async def optim_step(self, lr: float | None = None) -> Mapping[str, float]:
        """Clip the gradient and update the weights, at the rate `lr` or at the schedule's. The schedule counts steps, so all
        updates of a step have the same rate. A rate that was set for a policy (`policies[NAME].lr`) holds for it instead.

        Raises `DataError` without a gradient, and after `trainer.steps` if the schedule has fallen to 0."""
        async with self._turn:
            loop, now = self._loop, await self._present()
            if not now.pending:
                raise DataError("there is no gradient: call forward_backward() with a batch before optim_step()")
            alone = self.policies.get(POLICY)
            if alone is not None and alone.fixed is not None:
                lr = alone.fixed
            lr = self._scheduled() if lr is None else lr
            now.pending = False
            with loop.timed("train"):
                async with loop.stack.resting():
                    result = await asyncio.to_thread(loop.engine.optim_step, lr)
            now.updates.append(result)
            now.rows |= {place for place, _ in now.given}  # not before: a gradient may be lost
            assert now.batch is not None, "the gradient is of a batch"
            rows = rows_digest((row for _, row in sorted(now.given)), now.batch)
            now.computed.append((float(result.metrics["lr"]), rows))
            return result.metrics

    def _scheduled(self) -> float:
        """Return the scheduled rate of the present step. Raises `DataError` if it is 0, at which a step would teach nothing."""
        if not (rate := self._loop.rate(self.step + 1)):
            config = self._loop.stack.config
            raise DataError(
                f"engine.lr_schedule = {config.engine.lr_schedule} has fallen to 0, since trainer.steps = "
                f"{counted(config.trainer.steps, 'step')} are over: set trainer.steps to the steps of your loop, or "
                "give optim_step() "
                "a rate"
            )
        return rate

    async def publish(self) -> Mapping[str, float]:
        """Commit the step and make the policy server serve its weights. Return the step's metrics. Raises `DataError` when
        nothing was updated since the last call, or when rows of the batch were in no gradient."""
        async with self._turn:
            loop, now, began = self._loop, await self._present(), time.monotonic()
            if now.batch is None or not now.updates or now.result is None:
                raise DataError(
                    "nothing was updated since the last publish(): call forward_backward() and optim_step() before"
                )
            if now.pending:
                raise DataError("there is a gradient that no update has used: call optim_step() before publish()")
            if missed := len(now.batch.samples) - len(now.rows):
                raise DataError(
                    f"{counted(missed, 'row of the batch was', 'rows of the batch were')} in no gradient, and the record "
                    "would say the opposite: call "
                    "forward_backward() with all of them, or make a batch of fewer groups"
                )
            made, batch, step = self._batches[id(now.batch)], now.batch, self.step + 1
            groups, own = made.groups, OwnStep(rows_digest(made.rows, batch), tuple(now.computed))
            fresh = [group for group in groups if not self._taken[group.id]]
            said: dict[str, Json] = {OWN_LOOP: own.to_json()}
            if made.resting is not None:
                said[RESTING] = [*made.resting]
            reused: list[Json] = [rollout.id for rollout in batch.used if rollout.id in self._trained]
            if reused:
                said[REUSE] = {"limit": loop.stack.config.trainer.max_reuse, "rollouts": reused}
            sampled = Sampled(now.rollouts, fresh, now.seconds, {"reused": float(len(reused))} if reused else {})
            result = _summed(now.result, now.updates)
            try:
                metrics = await loop.take(step, sampled, groups, batch, result, said, own.digest)
            finally:
                if loop.done == step:  # committed, whatever failed then
                    self._committed(groups, batch)
                    for policy in self.policies.values():
                        policy.took(result)
            loop.reporter.step(step, metrics, time.monotonic() - began)
            return metrics

    async def evaluate(self) -> Evaluation | None:
        """Run the agent on the held-out tasks of `Trainer.session`, between two steps; return None without such tasks. Raises
        `DataError` during a step, whose weights are not served yet."""
        async with self._turn:
            if self._now is not None and (self._now.updates or self._now.pending):
                raise DataError("the policy server has not the weights of this step yet: publish() before evaluate()")
            return await self._loop.evaluate()

    async def _present(self) -> _Step:
        """Return the step that is being made. A step that was interrupted is begun anew: its rollouts stay in the record."""
        if self._now is None:
            known = await all_rollouts(self.store, self._loop.stack.run.id, split=TRAIN, step=self.step + 1)
            self._now = _Step(newest_generation(known) + 1 if known else 0)
            self._loop.begin_step()
        return self._now

    def _committed(self, groups: Sequence[Group], batch: Batch) -> None:
        trainer = self._loop.stack.config.trainer
        self._now, self._batches = None, {}
        self._taken.update(group.id for group in groups)
        trained = self._trained.union(rollout.id for rollout in batch.used)
        self._groups = {
            name: group
            for name, group in self._groups.items()
            if self._taken[name] <= trainer.max_reuse
            and all(self.step + 1 - member.rollout.step <= trainer.max_staleness for member in group.trajectories)
        }
        kept = (member.rollout.id for group in self._groups.values() for member in group.trajectories)
        self._trained = trained.intersection(kept)


def _given(rows: Sequence[Sample], made: _Made) -> list[tuple[int, tuple[str, str]]]:
    """Return the places of the rows in the batch, with their present digests. Raises `DataError` for a row that is not the
    batch's, since the record would not show it."""
    known = {_spans(row): place for place, row in enumerate(made.batch.samples)}
    given = []
    for row in rows:
        place, digests = known.get(_spans(row)), row_digests(row)
        if place is None or made.rows[place][0] != digests[0]:
            raise DataError(
                "a row is none of the batch's: give rows of batch.samples, with other weights or advantages at most"
            )
        given.append((place, digests))
    return given


def _spans(row: Sample) -> tuple[tuple[str, int, int, int, int], ...]:
    return tuple((span.rollout, span.attempt, span.seq, span.start, span.stop) for span in row.spans)


def _summed(result: StepResult, updates: Sequence[StepResult]) -> StepResult:
    """Return the result that a step reports: of its rows up to the first update, and of all updates."""
    metrics = dict(result.metrics)
    metrics |= {"lr": updates[-1].metrics["lr"]} if "lr" in updates[-1].metrics else {}
    for name in {name for update in updates for name in update.metrics}:
        values, key = [update.metrics[name] for update in updates if name in update.metrics], name.rpartition("/")[2]
        if key.endswith("grad_norm") or key == "gradient_share":
            metrics[name] = sum(values) / len(values)
        elif name.startswith("policy/") and key in ("lr", "updates", "skipped_nonfinite"):
            metrics[name] = values[-1] if key == "lr" else sum(values)
    taken = sum(update.metrics["updates"] for update in updates)
    return StepResult(metrics | {"updates": taken, "stepped": 1.0}, result.seen)


@asynccontextmanager
async def opened_session(
    trainer: Trainer, held_out: Sequence[Task], opened: AbstractAsyncContextManager[Loop]
) -> AsyncIterator[Session]:
    """Open `Trainer.session`: check the trainer's settings, then open its run. Raises what `check_settings` raises."""
    check_settings(trainer, held_out)
    async with opened as loop, Session(loop) as session:
        yield session


def check_settings(trainer: Trainer, held_out: Sequence[Task]) -> None:
    """Raise `ConfigError` for settings that a loop of somebody's own cannot carry out; warn of those that it does not use."""
    if trainer.recorded is not None or not isinstance(trainer.schedule, AlgorithmSchedule):
        raise ConfigError("a loop of your own samples rollouts and updates weights: give no record, and no search")
    if head := trainer.schedule.head:
        raise ConfigError(
            f"the head {head!r} is trained by Trainer.fit alone: choose a credit without one for your own loop"
        )
    asked, engine, plain = trainer.config.trainer, trainer.config.engine, Config().trainer
    if fixed_order(asked.order) is None or engine.minibatches * engine.epochs > 1:
        raise ConfigError(
            "orders of plugins (trainer.order), engine.minibatches and engine.epochs belong to Trainer.fit: your own loop "
            "chooses its tasks, and takes as many updates as it calls optim_step()"
        )
    if asked.sampling != plain.sampling:
        raise ConfigError(
            f"trainer.sampling = {asked.sampling} belongs to Trainer.fit: your own loop says what is sampled, and where "
            "branches begin with session.branch()"
        )
    if asked.max_reuse and not asked.max_staleness:
        raise ConfigError(
            f"trainer.max_reuse = {asked.max_reuse} with trainer.max_staleness = 0: after a step its rollouts are too old for "
            "another one. Set trainer.max_staleness to the age in steps at which a replay buffer drops them"
        )
    check_held_out(trainer.config, held_out)
    unused = ("tasks_per_step", "eval_every", "patience", "max_waves", "checkpoint_every")
    if said := [name for name in unused if getattr(asked, name) != getattr(plain, name)]:
        logger.warning("a loop of your own does not look at trainer.%s: leave it out", ", trainer.".join(said))
