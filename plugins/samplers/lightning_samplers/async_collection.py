"""The sampler that goes on sampling while the engine trains.

The invariant: a group begins with the policy server's current weights, and the number of the next step is recorded as
`Rollout.step` before an agent runs; that step takes the group, or a step at most `trainer.max_staleness` later
(`lightning_samplers.pacing`); no group is thrown away. The store has the whole state: which groups have begun, and, in
`StepRecord.groups`, which were taken.

A group begins only when a place for an agent is free, so that it has the newest weights. Evaluations use the same places,
before new groups; no step is taken meanwhile, so that all their tokens are of one version.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from lightning.asyncio_utils import cancel
from lightning.trainer.algorithm import samples_dynamically
from lightning.trainer.context import epoch_at
from lightning.trainer.plan import (
    START,
    TRAIN,
    fixed_order,
    is_lost,
    order_digest,
    place_after,
    tasks_from,
    train_rollouts,
)
from lightning.trainer.samplers import Asked, Sampled, Sampler
from lightning.trainer.training_data import all_rollouts, load_groups
from lightning.types import Rollout, Task, by_key

from lightning_samplers.pacing import OpenGroup, Pacer

RESYNC_SECONDS = 5.0
"""Seconds without news after which the store is read, because another process may have ended a rollout."""


@dataclass(slots=True)
class _Members:
    """The rollouts of an open group that have ended, and the number of its rollouts that have not (`missing`). `number` counts
    groups in the order in which they began; `task` is the task's id.

    `hopeless` says that the group had failed as a whole before this process started; `teaches` becomes true once the algorithm
    has said that the group has something to learn from.
    """

    number: int
    task: str
    missing: int
    ended: list[Rollout] = field(default_factory=list)
    hopeless: bool = False
    teaches: bool = False

    @property
    def failed(self) -> bool:
        """Whether all rollouts of the group have ended and failed, and not by the policy's own fault."""
        return not self.missing and is_lost(self.ended)


class Pipeline(Sampler):
    """The sampler `async`, which samples all the time. It is also the `Source` that the worker asks for new rollouts."""

    api, carries_out = 1, ("max_staleness", "order")

    def __init__(self, asked: Asked) -> None:
        self.config = asked.config.trainer
        self.changed = asyncio.Event()
        self._news = asyncio.Event()
        self._pacer = self._paced(0, [])
        self._members: dict[str, _Members] = {}
        self._unfinished: dict[str, Rollout] = {}
        self._places = Counter[int]()
        self._begun = self._before = 0
        self._order = START
        self._dropped: list[_Members] = []
        self._since = time.monotonic()
        self._worker: asyncio.Task[None] | None = None

    # what the loop asks -----------------------------------------------------------------------------------------
    async def start(self) -> None:
        """Restore the state from the store, and start the worker that samples all the time."""
        await self._recall()
        self.stack.agents.expect(self._unfinished.values())
        self._since = time.monotonic()
        self._worker = asyncio.create_task(self.stack.sample(self, self._ended_here))

    async def close(self) -> None:
        """Stop the worker: running agents are ended, and their leases are given back."""
        if self._worker is not None:
            await cancel(self._worker)

    async def step(self, step: int) -> Sampled:
        """Wait until the pacer picks the groups of the step. Return them together with the groups that were dropped since the
        last pick. The reported time of sampling is the time since the last pick."""
        what = f"rollouts for step {step}"
        self.reporter.phase(what, self.schedule.at(step).group_size * self.config.tasks_per_step)
        while (picked := await self._pick(what)) is None:
            await self._wait()
        taken = sorted([*picked, *self._dropped], key=lambda members: members.number)
        rollouts = [rollout for members in taken for rollout in sorted(members.ended, key=lambda one: one.index)]
        metrics = self._metrics()
        self._dropped = []
        groups = await load_groups(self.stack.store, rollouts, self.agents, self.config.policy_fault)
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        return Sampled(rollouts, groups, seconds, metrics)

    async def finish(self, rollouts: list[Rollout]) -> None:
        """Run these rollouts (of an evaluation) before new groups, and return when all have ended."""
        self._unfinished |= {rollout.id: rollout for rollout in rollouts}
        await self.stack.create(rollouts)
        self.changed.set()
        await self._ask_store()
        while any(rollout.id in self._unfinished for rollout in rollouts):
            await self._wait()
            self._news.clear()

    async def served(self, version: int) -> None:
        """Note the new version of the policy server: groups that begin now have its weights, and the groups of one more step
        may begin."""
        self._pacer.advance(version)
        self.changed.set()

    # what the worker asks ---------------------------------------------------------------------------------------
    async def refill(self) -> bool:
        """Begin the group of the next task if the bound on staleness has room for the group; return whether a group has
        begun."""
        if not self._pacer.room:
            return False
        run, step = self.stack.run.id, self._pacer.step
        taken_by = step + len(self._pacer) // self.config.tasks_per_step
        size, attempts = self.schedule.at(taken_by).group_size, self.stack.config.runner.max_attempts
        tasks = self._next(size)
        planned = train_rollouts(run, step, tasks, size, attempts, first=self._places[step])
        self._open(planned)
        self._pacer.begin(planned[0].group)
        await self.stack.create(planned)
        return True

    def unwanted(self, rollout: Rollout) -> str:
        """Return "": no group is thrown away."""
        return ""

    # inside -----------------------------------------------------------------------------------------------------
    def _next(self, size: int) -> list[Task]:
        """Return a list with the task of the next group."""
        if (order := fixed_order(self.config.order)) is None:
            place, waiting = f"group {self._begun}", {one.task for one in (*self._members.values(), *self._dropped)}
            return self.ordered(lambda chosen: chosen.ranked(place, size, without=waiting)[:1])
        return tasks_from(self.tasks, self._begun - self._before, 1, self.config.seed, order, self._order)

    def _paced(self, step: int, open_groups: Sequence[OpenGroup]) -> Pacer:
        config = self.config
        return Pacer(config.tasks_per_step, config.max_staleness, config.steps, step=step, open_groups=open_groups)

    async def _recall(self) -> None:
        """Restore the state from the store: the groups that began before this process, and the groups that steps have taken."""
        store, run = self.stack.store, self.stack.run.id
        records = await store.steps(run)
        taken, following = {group for record in records for group in record.groups}, len(records) + 1
        begun = [
            rollout
            for step in range(max(1, following - self.config.max_staleness), following + 1)
            for rollout in await all_rollouts(store, run, split=TRAIN, step=step)
        ]
        by_group = by_key(begun, lambda rollout: rollout.group)
        self._places.update(members[0].step for members in by_group.values() if members[0].group in taken)
        self._begun = len(taken)
        left = [members for group, members in by_group.items() if group not in taken]
        for members in left:
            self._open(members)
        await self._find_place(following)
        groups = [OpenGroup(members[0].group, members[0].step) for members in left]
        self._pacer = self._paced(following, groups)
        for rollout in begun:
            if rollout.status.ended:
                self._note(rollout)
        for waiting in self._members.values():
            # An earlier process may have given up because these groups failed. They do not count as failures here.
            waiting.hopeless = waiting.failed

    async def _find_place(self, step: int) -> None:
        """Find the place at which the passes over the tasks begin in the present config epoch.

        Groups begin ahead of the steps. Therefore the store keeps the number of groups that had begun at each epoch's start.
        The key of this number names the epoch, because an epoch without a step may be replaced by another epoch.
        """
        store, run = self.stack.store, self.stack.run.id
        until = self.epochs[: epoch_at(self.epochs, step).number + 1]
        begun = [0]
        for epoch in until[1:]:
            kept = await store.keep_state(run, f"begun/{epoch.first}/{order_digest(epoch)}", self._begun)
            begun.append(int(str(kept)))
        self._before = begun[-1]
        self._order = place_after(until, [after - before for before, after in pairwise(begun)], self.tasks)

    def _open(self, rollouts: Sequence[Rollout]) -> None:
        """Register a group whose rollouts are expected to end."""
        one = rollouts[0]
        self._members[one.group] = _Members(self._begun, one.task.id, len(rollouts))
        self._unfinished |= {rollout.id: rollout for rollout in rollouts}
        self._places[one.step] += 1
        self._begun += 1

    def _ended_here(self, rollout: Rollout) -> None:
        self.finished(rollout)
        self._note(rollout)

    def _note(self, rollout: Rollout) -> None:
        """Note that a rollout has ended; a second note of the same rollout has no effect."""
        if self._unfinished.pop(rollout.id, None) is None:
            return
        self._news.set()
        members = self._members.get(rollout.group)
        if members is not None:
            members.ended.append(rollout)
            members.missing -= 1
            if not members.missing:
                self._pacer.finish(rollout.group)

    async def _pick(self, what: str) -> list[_Members] | None:
        """Return the groups that the present step trains on; None while the step must wait for more groups.

        Raises `RunnerError` if all rollouts of these groups and of the dropped groups failed, and none of them by the policy's
        own fault (`Sampler.check`). A step that waits raises it once it has dropped as many groups as a step trains on. Groups
        that had failed before this process started do not count.
        """
        self._news.clear()
        await self._drop_useless()
        picked = self._pacer.pick()
        taken = [self._members.pop(group) for group in picked or ()]
        new = [rollout for members in (*self._dropped, *taken) if not members.hopeless for rollout in members.ended]
        if picked is not None or (len(self._dropped) >= self.config.tasks_per_step and is_lost(new)):
            self.check(what, new)
        return None if picked is None else taken

    async def _drop_useless(self) -> None:
        """Move finished groups that teach nothing to `_dropped`, at most as many as `trainer.max_waves` allows. These do not
        count towards the `tasks_per_step` groups of the step. Groups that had failed before this process started are always
        moved."""
        dynamic = samples_dynamically(self.schedule.at(self._pacer.step))
        left = (self.config.max_waves - 1) * self.config.tasks_per_step if dynamic else 0
        left -= sum(not members.hopeless for members in self._dropped)
        while (group := self._unasked(left)) is not None:
            members = self._members[group]
            if not members.hopeless:
                members.teaches = await self._teaches(members)
                if members.teaches:
                    continue
                left -= 1
            self._pacer.drop(group)
            self._dropped.append(self._members.pop(group))
            self.changed.set()

    def _unasked(self, left: int) -> str | None:
        """Return the id of a finished group that `_drop_useless` must still keep or drop; None if there is none.

        A group that had failed before this process started is always returned. Any other group is returned only while `left`,
        the number of groups that may still be dropped, is above 0, and only until the algorithm has said that the group teaches
        something.

        The search starts at the first group each time, because more groups finish while the algorithm is asked about one.
        """
        for group in self._pacer.open_groups:
            members = self._members[group.id]
            if group.finished and not members.teaches and (left > 0 or members.hopeless):
                return group.id
        return None

    async def _teaches(self, members: _Members) -> bool:
        algorithm = self.schedule.at(self._pacer.step)
        assert samples_dynamically(algorithm)
        (group,) = await load_groups(self.stack.store, members.ended, self.agents, self.config.policy_fault)
        return algorithm.teaches(group)

    async def _wait(self) -> None:
        """Wait until a rollout ends, or read the store after `RESYNC_SECONDS`. Raises the worker's error if the worker has
        ended."""
        assert self._worker is not None
        news = asyncio.create_task(self._news.wait())
        waiting = {self._worker, news}
        try:
            done, _ = await asyncio.wait(waiting, timeout=RESYNC_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            news.cancel()
        if self._worker in done:
            self._worker.result()
        if not done:
            await self._ask_store()

    async def _ask_store(self) -> None:
        """Note the rollouts that have ended in the store without a message to this process."""
        for split, step in {(rollout.split, rollout.step) for rollout in self._unfinished.values()}:
            for rollout in await all_rollouts(self.stack.store, self.stack.run.id, split=split, step=step):
                if rollout.status.ended:
                    self._note(rollout)

    def _metrics(self) -> dict[str, float]:
        return {
            "pipeline/groups_begun": float(self._begun),
            "pipeline/groups_open": float(len(self._pacer)),
            "pipeline/groups_carried": float(self._pacer.carried()),
            "pipeline/groups_dropped": float(len(self._dropped)),
            "pipeline/rollouts_unfinished": float(len(self._unfinished)),
        }
