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
committed, with the loop's state, and `lightning audit` derives its batch again.

Agents run while the engine works (`lightning_session.sampling`). Calls that use the engine wait for one another, and a call
that is cancelled while the engine computes is finished first, so that no step is left half made.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Self

from lightning.algorithms.protocol import Algorithm, Batch
from lightning.asyncio_utils import in_thread, to_its_end
from lightning.batch import Group, Sample
from lightning.config import Config
from lightning.engines.protocol import Engine, StepResult
from lightning.errors import ConfigError, DataError
from lightning.losses.protocol import Loss, check_updates
from lightning.safe_text import counted
from lightning.store.protocol import Store
from lightning.store.rollout_state import REUSE
from lightning.trainer.algorithm import AlgorithmSchedule
from lightning.trainer.context import RESTING
from lightning.trainer.loop import Loop
from lightning.trainer.plan import TRAIN, as_tasks, fixed_order
from lightning.trainer.samplers import Sampled
from lightning.trainer.summary import Evaluation, check_held_out
from lightning.trainer.training_data import all_rollouts, load_groups, of_interest, without
from lightning.types import POLICY, Json, Rollout, Task, Transition, as_texts
from lightning_branching.planned import branch_rollouts, warn_of_credit
from lightning_proof.recorded_step import OWN_LOOP, OwnStep, row_digests, rows_digest

from lightning_session.kept import own_metrics, packed, state_bytes, unpacked, without_taken
from lightning_session.policies import SessionPolicy, others, policies_of
from lightning_session.sampling import Queue, Stream, Wanted

if TYPE_CHECKING:
    from lightning import Trainer
    from lightning.losses.policy_gradient import OwnLoss

logger = logging.getLogger(__name__)

OF_NO_BATCH = -1
"""The place of a row that is none of the step's batch."""


@dataclass
class _Step:
    """The state of the step that is being made. `rollouts` were sampled for it. `result` is the engine's result for its rows up
    to the first update, with the spans that it has seen in all rows. `pending` says whether there is a gradient, `rows` are the
    rows that updates have used, `metrics` the loop's own."""

    rollouts: list[Rollout] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    next_index: dict[str, int] = field(default_factory=dict)
    """The number of the next branch of a group, for groups with branches."""
    batch: Batch | None = None
    computing: Batch | None = None
    """The batch on which the engine computes now."""
    result: StepResult | None = None
    pending: bool = False
    rows: set[int] = field(default_factory=set)
    given: list[tuple[int, tuple[str, str]]] = field(default_factory=list)
    """The rows of the present gradient: the place of each in the batch, and its digests when it was given."""
    updates: list[StepResult] = field(default_factory=list)
    computed: list[tuple[float, str]] = field(default_factory=list)
    """For each update its learning rate, and the digest of the rows that it was computed on."""

    @contextmanager
    def on(self, batch: Batch | None) -> Iterator[None]:
        """The engine computes on this batch in the block."""
        self.computing = batch
        try:
            yield
        finally:
            self.computing = None


@dataclass(frozen=True)
class _Made:
    """A batch that `Session.batch` made by an algorithm, its groups, and the digests of its rows when it was made."""

    batch: Batch
    algorithm: Algorithm
    groups: Sequence[Group]
    rows: Sequence[tuple[str, str]]
    resting: Sequence[str] | None
    """The policies that were left out by name; None if none were named."""
    turn: Sequence[str]
    """The policies that rested in the step for which it was made, by the run's settings; empty if policies were named."""


class Session:
    """An open run; `Trainer.session` makes it. `step` counts the committed steps, which is the policy's version, too. Agents
    run while other calls are under way; calls that use the engine wait for one another."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._now = _Step()
        self._queue = Queue()
        self._groups: dict[str, Group] = {}
        """The groups that `rollout` has returned, until they were in as many steps as they may be, or are too old."""
        self._taken = Counter[str]()
        """For each group the number of steps that it was in."""
        self._trained: set[str] = set()
        """The rollouts of `_groups` that were trained in a step."""
        self._batches: dict[int, _Made] = {}
        """The batches that a step may train on, by their identity."""
        self._branched = False
        """Whether `branch` was called."""
        self._engine, self._making = asyncio.Lock(), asyncio.Lock()
        self._policies = policies_of(loop, self._computing)
        self._state: Json | bytes = None
        self._since = time.monotonic()
        self._last: Mapping[str, float] = {}
        """The metrics of the last step, without the loop's own."""
        self._resources = AsyncExitStack()

    async def __aenter__(self) -> Self:
        loop = self._loop
        async with AsyncExitStack() as opened:
            loop.sampler = self._queue
            sampler = loop.sampling()
            await loop.restore()
            self._queue.next = loop.done + 1
            await self._recall()
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
            if self._now.updates:
                raise DataError("the last updates are in no step: publish() before the session ends")
            await self._queue.give_up_all()
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

    @property
    def state(self) -> Json | bytes:
        """A value of the loop's own, None at first: `publish()` keeps it with its step, and a run that goes on begins with that
        of its last step. It may be changed in place. Raises `DataError` if it is set to what is neither JSON nor bytes, or is
        larger than 1 MiB."""
        return self._state

    @state.setter
    def state(self, value: Json | bytes) -> None:
        state_bytes(value)
        self._state = value

    def log(self, metrics: Mapping[str, float]) -> None:
        """Add metrics to the step that is being made, named `PREFIX/NAME` with a prefix of your own. Of several values of one
        name the last one before `publish()` counts. Raises `DataError` for names that lightning or a plugin has, and for values
        that are no finite numbers."""
        self._now.metrics |= own_metrics(metrics, self._names())

    def _names(self) -> list[str]:
        """Return the names of metrics and stages that others have, as far as they are known."""
        result = self._now.result
        return [*self._last, *self._loop.stages.versions, *(result.metrics if result else ())]

    def _sizes(self, n: int | None, keep: int | None) -> tuple[int, int]:
        """Return how many rollouts a group begins with, and how many of them are to end."""
        size = self._loop.schedule.at(self.step + 1).group_size if n is None else n
        if size < 1:
            raise DataError(f"n = {n}: a group has at least one rollout")
        if keep is not None and not 1 <= keep <= size:
            raise DataError(f"keep = {keep}: of the n = {size} rollouts of a group 1 to {size} can be kept")
        return size, keep or size

    async def rollout(
        self, tasks: Sequence[Task | Json], n: int | None = None, *, keep: int | None = None
    ) -> list[Group]:
        """Run the agent `n` times (default: the algorithm's group size) on each task. A group is complete when `keep` of its
        rollouts have ended (default: all); those that still run then are cancelled.

        May be called several times in a step, and several times at once. Raises `RunnerError` when all fail; otherwise rollouts
        that fail are in the record and in no group. If it is cancelled, what it began is ended and is in no step.
        """
        given, queue, step = as_tasks(tasks, "tasks"), self._queue, self.step + 1
        if not given:
            raise DataError("the list of tasks is empty: give rollout() at least one")
        size, keep = self._sizes(n, keep)
        what = f"rollouts of step {step}"
        self._loop.reporter.phase(what, len(given) * keep)
        groups = [queue.want(task, size, keep) for task in given]
        try:
            await queue.until(lambda: all(group.done for group in groups))
        except BaseException:
            queue.give_up(groups)
            raise
        queue.check_wanted(groups)
        ended = [rollout for group in groups for rollout in group.rollouts]
        queue.check(what, ended)
        return await self._took(ended)

    def stream(
        self,
        tasks: Iterable[Task | Json],
        n: int | None = None,
        *,
        keep: int | None = None,
        ahead: int | None = None,
        again: int = 1,
    ) -> Stream:
        """Run the agent on tasks one after another, and return their groups as they complete: `async for group in
        session.stream(tasks)`. `n` and `keep` are those of `rollout`. A task is taken from `tasks`, which may be endless, when
        there is a place for an agent, and while fewer than `ahead` groups are under way or complete and not taken yet (default:
        as many as have all places, and one more).

        When the loop is left, what is under way is ended. A group that has become too old for the next step
        (`trainer.max_staleness`) is ended and left out; its task is asked again, before new ones, up to `again` times.
        Rollouts that fail are in no group, and groups without any are left out.
        """
        if isinstance(tasks, Sequence):
            tasks = as_tasks(tasks, "tasks")
        size, keep = self._sizes(n, keep)
        if ahead is not None and ahead < 1:
            raise DataError(f"ahead = {ahead}: give how many groups may be under way, 1 or more")
        if again < 0:
            raise DataError(
                f"again = {again}: give how often to ask the task of a group that became too old again, 0 or more"
            )

        async def took(group: Wanted) -> Group:
            (found,) = await self._took(group.rollouts)
            return found

        usual = -(-self._queue.places // keep) + 1
        return Stream(self._queue, iter(tasks), size, keep, ahead or usual, again, took)

    async def _took(self, ended: Sequence[Rollout]) -> list[Group]:
        """Read groups that have ended; steps may be made of them from now on."""
        loop = self._loop
        fault = loop.stack.config.trainer.policy_fault
        found = await load_groups(self.store, ended, loop.agents_at(self.step + 1), fault)
        self._now.rollouts += ended  # not before: a call that is cancelled meanwhile has taken nothing
        self._groups |= {group.id: group for group in found if not self._is_late(group)}
        return found

    async def groups(self, ids: Sequence[str]) -> list[Group]:
        """Read groups that this run has sampled again, in this order, as for a replay buffer after a resume. Raises `DataError`
        for a group that is older than `trainer.max_staleness` steps, was never sampled, or has not ended."""
        loop, oldest = self._loop, self.step + 1 - self._loop.stack.config.trainer.max_staleness
        members: dict[str, list[Rollout]] = {name: [] for name in as_texts(ids, "ids") if name not in self._groups}
        for step in range(max(1, oldest), self.step + 2) if members else ():
            for rollout in await all_rollouts(self.store, loop.stack.run.id, split=TRAIN, step=step):
                if rollout.group in members:
                    members[rollout.group].append(rollout)
        for name, found in members.items():
            if not found or not all(rollout.status.ended for rollout in found):
                raise DataError(
                    f"{name} has rollouts that have not ended"
                    if found
                    else f"{name} is no group that this run sampled for steps {max(1, oldest)} to {self.step + 1}, which are "
                    f"those that trainer.max_staleness = {loop.stack.config.trainer.max_staleness} lets the next step train"
                )
        every = [rollout for found in members.values() for rollout in found]
        fault = loop.stack.config.trainer.policy_fault
        read = await load_groups(self.store, every, loop.agents_at(self.step + 1), fault) if every else []
        self._trained.update(rollout.id for rollout in every if rollout.trained_at_step is not None)
        self._groups |= {group.id: group for group in read if group.id not in self._groups}
        return [self._groups[name] for name in ids]

    async def _recall(self) -> None:
        """Read what the loop kept with its last step, and which groups the steps before have trained."""
        loop, run = self._loop, self._loop.stack.run.id
        last = await self.store.last_step(run)
        self._state, rates = unpacked(last)
        for name, rate in rates.items():
            if (policy := self._policies.get(name)) is not None and policy.trained:
                policy.lr = rate
                loop.reporter.say(f"the learning rate of the policy {name} is {rate:g}, as the loop had set it")
        after = max(0, loop.done - loop.stack.config.trainer.max_staleness)
        for record in await self.store.steps(run, after=after):
            self._taken.update(record.groups)

    def _is_late(self, group: Group) -> bool:
        """Whether a group is too old for the next step."""
        oldest = self.step + 1 - self._loop.stack.config.trainer.max_staleness
        return any(member.rollout.step < oldest for member in group.trajectories)

    @asynccontextmanager
    async def _computing(self) -> AsyncIterator[None]:
        """The engine computes in the block, and nothing else does on it."""
        async with self._engine, self._queue.training(), self._loop.stack.resting():
            yield

    async def branch(self, group: Group, at: Transition, n: int = 8) -> Group:
        """Run the agent `n` more times from a call of one of the group's rollouts on: earlier calls are answered from the
        record, the others are sampled. Return the group with those branches that are valid, which replaces the given one; a
        warning tells of the others. Raises `DataError` for a group of another step, or a call from which none can start."""
        if n < 1:
            raise DataError(f"n = {n}: give the number of branches, 1 or more")
        now, loop = self._now, self._loop
        trunk = next((member for member in group.trajectories if member.rollout.id == at.rollout), None)
        if trunk is None or self._groups.get(group.id) is not group or trunk.rollout.step != self.step + 1:
            raise DataError(f"{group.id} is no group of this step's rollout() that has the call {at.key}")
        self._forget_batches_of(group, now)
        del self._groups[
            group.id
        ]  # interrupted, its branches stand in the store, and it is trained with them or not at all
        (one,) = branch_rollouts([(trunk, at)], 0)
        try:
            await loop.stack.gateway.parts.line.planned(one)
            first = await self._next_index(one)
        except BaseException:
            self._groups[group.id] = group  # there are no branches of it
            raise
        now.next_index[group.id] = first + n  # also if this is interrupted: an id never belongs to two calls
        planned = branch_rollouts([(trunk, at)] * n, first)
        ended = await self._queue.ended(planned, f"branches of step {trunk.rollout.step}")
        new = {rollout.id for rollout in planned}
        branches = [rollout for rollout in ended if rollout.id in new]
        self._queue.tell_failed(f"branches of step {trunk.rollout.step}", branches)
        self._now.rollouts += branches
        fault, agents = loop.stack.config.trainer.policy_fault, loop.agents_at(self.step + 1)
        (found,) = await load_groups(self.store, ended, agents, fault)
        if not self._is_late(found):
            self._groups[group.id] = found
        if not self._branched:
            self._branched = True
            warn_of_credit((loop.schedule.at(self.step + 1),))
        return found

    async def _next_index(self, one: Rollout) -> int:
        """Return the number of the next branch of a group, of which `one` is a rollout: the store has its cancelled rollouts,
        too, and an id never belongs to two rollouts."""
        stored = await all_rollouts(self.store, one.run, split=one.split, step=one.step)
        highest = max(rollout.index for rollout in stored if rollout.group == one.group)
        return max(highest + 1, self._now.next_index.get(one.group, 0))

    def _forget_batches_of(self, group: Group, now: _Step) -> None:
        """Drop the batches of a group that is about to change. Raises `DataError` if one of them is being trained on."""
        for name, made in list(self._batches.items()):
            if any(each.id == group.id for each in made.groups):
                trained = now.batch is made.batch and (now.updates or now.pending)
                if trained or now.computing is made.batch:
                    raise DataError(f"{group.id} is in the batch that this step trains on: branch before that")
                del self._batches[name]

    async def batch(self, groups: Sequence[Group], policies: Sequence[str] | None = None) -> Batch:
        """Make the rows of groups, as the run's algorithm makes them: credit, filtering, weights. With `policies` the step
        trains these of the run's policies alone: the batch has the rows of their calls, and the others rest.

        Raises `DataError` for groups that the session has not returned like this, that were in more steps than
        `trainer.max_reuse` allows, or that are older than `trainer.max_staleness` steps, and for names that are not those of
        trained policies."""
        resting = None if policies is None else others(self.policies, policies)
        if len({group.id for group in groups}) < len(groups):
            raise DataError("a group is there twice: give each once")
        self._check(groups)
        async with self._making:
            while True:
                given, algorithm, turn = groups, self._loop.schedule.at(self.step + 1), self._turn(resting)
                if resting is not None or turn:  # else a group has the calls that each step trains
                    given = of_interest(groups, (*self._loop.train_agents, *without(resting or turn)))
                batch = await in_thread(algorithm.batch, given)
                rows = await asyncio.to_thread(lambda rows: [*map(row_digests, rows)], batch.samples)
                self._check(groups)  # a step may have been published meanwhile
                made = _Made(batch, algorithm, [*given], rows, resting, turn)
                if self._is_of_next(made):
                    self._batches[id(batch)] = made
                    return batch

    def _turn(self, resting: Sequence[str] | None) -> Sequence[str]:
        """Return the policies that rest in the next step by the run's settings; none if `resting` names those that do."""
        return () if resting is not None else self._loop.resting(self.step + 1)

    def _is_of_next(self, made: _Made) -> bool:
        """Whether the next step can be made of a batch: by its algorithm, and in its turn of the policies."""
        following = self._loop.schedule.at(self.step + 1)
        return made.algorithm is following and made.turn == self._turn(made.resting)

    def _check(self, groups: Sequence[Group]) -> None:
        """Raise `DataError` for groups of which the next step cannot be made."""
        trainer = self._loop.stack.config.trainer
        for group in groups:
            if (taken := self._taken[group.id]) > trainer.max_reuse:
                raise DataError(
                    f"{group.id} was trained in a step before ({taken} in all), and trainer.max_reuse = {trainer.max_reuse} is "
                    "in how many steps beyond its first it may be: set trainer.max_reuse for a replay buffer, or sample others"
                )
            if self._groups.get(group.id) is not group:
                raise DataError(
                    f"{group.id} is no group of this session that can be trained: it is older than "
                    f"trainer.max_staleness = {trainer.max_staleness} steps, was changed, or branch() was interrupted on it"
                )

    async def forward_backward(
        self, batch: Batch, samples: Sequence[Sample] | None = None, *, loss: Loss | OwnLoss | None = None
    ) -> Mapping[str, float]:
        """Add the gradient of a batch of this session, or of some of its rows. Return the metrics of all rows since the last
        update. You may change weights and advantages: the step's record then says that its rows were changed.

        With `loss`, a `Loss` or a function that returns one loss for each token, these rows are trained with it instead of with
        the algorithm's loss, and may be rows that no policy sampled (`lightning.batch.given_rows`). Gradients add up until
        `optim_step()`, and the record says that rows were changed.

        Raises `DataError` for another batch in a step that has updates, and for rows that are not the batch's; `ConfigError`
        for a loss that several updates, or parts of a batch, would change."""
        async with self._computing():
            with self._now.on(batch):
                return await to_its_end(self._forward_backward(batch, samples, loss))

    async def _forward_backward(
        self, batch: Batch, samples: Sequence[Sample] | None, own: Loss | OwnLoss | None
    ) -> Mapping[str, float]:
        loop, now = self._loop, self._now
        if id(batch) not in self._batches:
            raise DataError("this batch was not made by session.batch() for this step: make one of the groups")
        if now.batch is not batch and now.batch is not None and (now.updates or now.pending):
            raise DataError("a step has one batch, on which it may take several updates: publish() before another one")
        rows = batch.samples if samples is None else tuple(samples)
        if not rows:
            left_out = ", ".join(f"{count} x {why}" for why, count in batch.skipped.items()) or "no group was given"
            raise DataError(f"the batch has no row to train on ({left_out}): sample other tasks, make another batch")
        loss = batch.loss_for(loop.schedule.at(self.step + 1), own)
        check_updates(loss, several=bool(now.updates), parts=samples is not None)
        said = "" if own is None else rows_digest((), replace(batch, loss=loss))
        given = await asyncio.to_thread(_given, rows, self._batches[id(batch)], said)
        await loop.writer.training()
        if now.batch is not batch:
            now.batch, now.rows, now.result = batch, set(), None
        before, now.given, now.pending = now.given if now.pending else [], [], False
        with loop.timed("train"):
            result = await asyncio.to_thread(loop.engine.forward_backward, rows, loss)
        now.pending, now.given = True, before + given
        seen = {**result.seen, **(now.result.seen if now.result else {})}
        now.result = replace(now.result if now.updates and now.result else result, seen=seen)
        return result.metrics

    async def optim_step(self, lr: float | None = None) -> Mapping[str, float]:
        """Clip the gradient and update the weights, at the rate `lr` or at the schedule's. The schedule counts steps, so all
        updates of a step have the same rate. A rate that was set for a policy (`policies[NAME].lr`) holds for it instead.

        Raises `DataError` without a gradient, and after `trainer.steps` if the schedule has fallen to 0."""
        async with self._computing():
            with self._now.on(self._now.batch):
                return await to_its_end(self._optim_step(lr))

    async def _optim_step(self, lr: float | None) -> Mapping[str, float]:
        loop, now = self._loop, self._now
        if not now.pending:
            raise DataError("there is no gradient: call forward_backward() with a batch before optim_step()")
        alone = self.policies.get(POLICY)
        if alone is not None and alone.fixed is not None:
            lr = alone.fixed
        lr = self._scheduled() if lr is None else lr
        now.pending = False
        with loop.timed("train"):
            result = await asyncio.to_thread(loop.engine.optim_step, lr)
        now.updates.append(result)
        now.rows |= {place for place, _ in now.given} - {OF_NO_BATCH}  # not before: a gradient may be lost
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
        """Commit the step, with `state`, and make the policy server serve its weights. Return the step's metrics. Agents that
        run go on: their further tokens are the new weights', and the record says which weights sampled which tokens.

        Raises `DataError` when nothing was updated since the last call, when rows of the batch were in no gradient, and while
        rollouts are under way if `trainer.max_staleness` is 0."""
        async with self._engine:
            self._check_publish()
            config = self._loop.stack.config.trainer
            async with AsyncExitStack() as held:
                if not config.max_staleness:
                    await held.enter_async_context(self._queue.alone())  # what was given up comes to its end
                return await to_its_end(self._publish())

    def _check_publish(self) -> None:
        """Raise `DataError` unless the step can be committed now."""
        now = self._now
        if now.batch is None or not now.updates or now.result is None:
            raise DataError(
                "nothing was updated since the last publish(): call forward_backward() and optim_step() before"
            )
        if now.pending:
            raise DataError("there is a gradient that no update has used: call optim_step() before publish()")
        if missed := len(now.batch.samples) - len(now.rows):
            raise DataError(
                f"{counted(missed, 'row of the batch was', 'rows of the batch were')} in no gradient, and the record would say "
                "the opposite: call forward_backward() with all of them, or make a batch of fewer groups"
            )
        if not self._loop.stack.config.trainer.max_staleness and self._queue.busy:
            raise DataError(
                "rollouts are under way, and trainer.max_staleness = 0 lets no step train on tokens of older weights, which "
                "theirs would be: end rollout(), branch() and stream() before publish(), or set trainer.max_staleness to the "
                "age in steps that a rollout may have"
            )

    async def _publish(self) -> Mapping[str, float]:
        loop, now, step = self._loop, self._now, self.step + 1
        rates = {name: policy.fixed for name, policy in self.policies.items() if policy.fixed is not None}
        extras = packed(self._state, rates)  # a state that cannot be kept is refused before anything is taken
        batch, first, began, self._since = now.batch, now.result, self._since, time.monotonic()
        rollouts, logged, now.metrics = [*now.rollouts], without_taken(now.metrics, self._names()), {}  # more may come
        assert batch is not None and first is not None, "publish() has looked"  # noqa: PT018 — for mypy
        made = self._batches[id(batch)]
        groups, own = made.groups, OwnStep(rows_digest(made.rows, batch), tuple(now.computed))
        fresh = [group for group in groups if not self._taken[group.id]]
        said: dict[str, Json] = {OWN_LOOP: own.to_json()}
        if made.resting is not None:
            said[RESTING] = [*made.resting]
        reused: list[Json] = [rollout.id for rollout in batch.used if rollout.id in self._trained]
        if reused:
            said[REUSE] = {"limit": loop.stack.config.trainer.max_reuse, "rollouts": reused}
        sampled, overlap = self._queue.clock.take()
        left_out, self._queue.left_out = self._queue.left_out, Counter()
        metrics = {"reused": float(len(reused))} if reused else {}
        metrics |= {name: float(count) for name, count in left_out.items()}
        metrics |= {"seconds/rollout": sampled - overlap, "overlap_seconds": overlap} | logged
        new = Sampled(rollouts, fresh, sampled, metrics)
        result = _summed(first, now.updates)
        try:
            found = await loop.take(step, new, groups, batch, result, said, own.digest, extras)
        finally:
            if loop.done == step:  # committed, whatever failed then
                self._committed(groups, batch)
                self._now = _Step(now.rollouts[len(rollouts) :], now.metrics)
                for policy in self.policies.values():
                    policy.took(result)
            else:  # the next attempt at this step has all that this one has taken
                now.metrics, self._since = logged | now.metrics, began
                self._queue.left_out += left_out
                self._queue.clock.put_back(sampled, overlap)
        self._last = {name: value for name, value in found.items() if name not in logged}
        loop.reporter.step(step, found, time.monotonic() - began)
        return found

    async def evaluate(self) -> Evaluation | None:
        """Run the agent on the held-out tasks of `Trainer.session`, between two steps; return None without such tasks. Raises
        `DataError` during a step, whose weights are not served yet."""
        async with self._engine:
            if self._now.updates or self._now.pending:
                raise DataError("the policy server has not the weights of this step yet: publish() before evaluate()")
            found = await self._loop.evaluate()
            self._loop.begin_step()
            return found

    def _committed(self, groups: Sequence[Group], batch: Batch) -> None:
        max_reuse = self._loop.stack.config.trainer.max_reuse
        self._taken.update(group.id for group in groups)
        trained = self._trained.union(rollout.id for rollout in batch.used)
        self._groups = {
            name: group
            for name, group in self._groups.items()
            if self._taken[name] <= max_reuse and not self._is_late(group)
        }
        kept = (member.rollout.id for group in self._groups.values() for member in group.trajectories)
        self._trained = trained.intersection(kept)
        self._batches = {
            name: made
            for name, made in self._batches.items()
            if self._is_of_next(made) and all(group.id in self._groups for group in made.groups)
        }
        self._loop.begin_step()


def _given(rows: Sequence[Sample], made: _Made, loss: str) -> list[tuple[int, tuple[str, str]]]:
    """Return the places of the rows in the batch, with their present digests. `loss` is the digest of a loss that the loop has
    given; empty for the algorithm's. With such a loss a row that is none of the batch's has the place `OF_NO_BATCH`; without
    one it raises `DataError`, since nothing but the batch would say what is learned from it."""
    known = {_spans(row): place for place, row in enumerate(made.batch.samples)}
    given = []
    for row in rows:
        place, digests = known.get(_spans(row), OF_NO_BATCH), row_digests(row)
        if place != OF_NO_BATCH and made.rows[place][0] != digests[0]:
            place = OF_NO_BATCH
        if place == OF_NO_BATCH and not loss:
            raise DataError(
                "a row is none of the batch's: give rows of batch.samples, with other weights or advantages at most, or say "
                "with loss=... what is learned from other rows"
            )
        given.append((place, (digests[0], digests[1] + loss)))
    return given


def _spans(row: Sample) -> tuple[tuple[str, int, int, int, int], ...]:
    return tuple((span.rollout, span.attempt, span.seq, span.start, span.stop) for span in row.spans)


def _summed(result: StepResult, updates: Sequence[StepResult]) -> StepResult:
    """Return the result that a step reports: `result`, with what is of all updates."""
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
