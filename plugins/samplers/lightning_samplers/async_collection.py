"""Rollouts that go on while the engine trains.

The invariant: a group begins with the version that the policy server has, recorded as `Rollout.step` before an agent runs,
and is taken by one step that is at most `trainer.max_staleness` later (`lightning_samplers.pacing`); none is thrown away. The
store knows all of this: which groups have begun, and, by `StepRecord.groups`, which of them were taken.

A group begins only when an agent's place is free, so that it begins with the newest weights there are. Evaluations run on the
same places, before new groups; no step is taken meanwhile, so all their tokens are of one version.
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
from lightning.trainer.epochs import epoch_at
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
"""After so long without news the store is asked: another process may have ended a rollout."""


@dataclass(slots=True)
class _Members:
    """The rollouts of an open group that have ended, and how many have not. `number` counts groups as they began, `task` is the
    task's id.

    `hopeless` groups had failed as a whole before this process; `teaches` is known once an algorithm was asked.
    """

    number: int
    task: str
    missing: int
    ended: list[Rollout] = field(default_factory=list)
    hopeless: bool = False
    teaches: bool = False

    @property
    def failed(self) -> bool:
        """Whether every one has failed, and not by the policy's own fault."""
        return not self.missing and is_lost(self.ended)


class Pipeline(Sampler):
    """Samples all the time. It is also the `Source` that the worker asks for rollouts."""

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
        """See `Sampler.start`."""
        await self._recall()
        self.stack.agents.expect(self._unfinished.values())
        self._since = time.monotonic()
        self._worker = asyncio.create_task(self.stack.sample(self, self._ended_here))

    async def close(self) -> None:
        """See `Sampler.close`: agents that run are ended, their leases given back."""
        if self._worker is not None:
            await cancel(self._worker)

    async def step(self, step: int) -> Sampled:
        """See `Sampler.step`. Waits until the pacer has a pick; the time between two picks is what it took to sample."""
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
        """See `Sampler.finish`. The worker takes them before it asks for new groups."""
        self._unfinished |= {rollout.id: rollout for rollout in rollouts}
        await self.stack.create(rollouts)
        self.changed.set()
        await self._ask_store()
        while any(rollout.id in self._unfinished for rollout in rollouts):
            await self._wait()
            self._news.clear()

    async def served(self, version: int) -> None:
        """See `Sampler.served`. From now on groups begin with this version, and there is room for those of another step."""
        self._pacer.advance(version)
        self.changed.set()

    # what the worker asks ---------------------------------------------------------------------------------------
    async def refill(self) -> bool:
        """Begin the group of the next task, if the bound on staleness has room for it; returns whether it had."""
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

    # inside -----------------------------------------------------------------------------------------------------
    def _next(self, size: int) -> list[Task]:
        """The task of the next group, in a list."""
        if (order := fixed_order(self.config.order)) is None:
            place, waiting = f"group {self._begun}", {one.task for one in (*self._members.values(), *self._dropped)}
            return self.ordered(lambda chosen: chosen.ranked(place, size, without=waiting)[:1])
        return tasks_from(self.tasks, self._begun - self._before, 1, self.config.seed, order, self._order)

    def _paced(self, step: int, open_groups: Sequence[OpenGroup]) -> Pacer:
        config = self.config
        return Pacer(config.tasks_per_step, config.max_staleness, config.steps, step=step, open_groups=open_groups)

    async def _recall(self) -> None:
        """Read from the store what had begun before this process, and what of it was taken."""
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
            # An earlier process may have given up because of these. They are not held against this one.
            waiting.hopeless = waiting.failed

    async def _find_place(self, step: int) -> None:
        """Where the passes over the tasks begin in the present config epoch: groups begin ahead of the steps, so how many had
        begun at each epoch's start is kept, for that epoch alone: one of which no step came may be replaced by another one."""
        store, run = self.stack.store, self.stack.run.id
        until = self.epochs[: epoch_at(self.epochs, step).number + 1]
        begun = [0]
        for epoch in until[1:]:
            kept = await store.keep_state(run, f"begun/{epoch.first}/{order_digest(epoch)}", self._begun)
            begun.append(int(str(kept)))
        self._before = begun[-1]
        self._order = place_after(until, [after - before for before, after in pairwise(begun)], self.tasks)

    def _open(self, rollouts: Sequence[Rollout]) -> None:
        """Expect the rollouts of a group."""
        one = rollouts[0]
        self._members[one.group] = _Members(self._begun, one.task.id, len(rollouts))
        self._unfinished |= {rollout.id: rollout for rollout in rollouts}
        self._places[one.step] += 1
        self._begun += 1

    def _ended_here(self, rollout: Rollout) -> None:
        self.finished(rollout)
        self._note(rollout)

    def _note(self, rollout: Rollout) -> None:
        """A rollout has ended. Hearing of it twice does no harm."""
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
        """The groups that the present step takes and that count for it; None while it has to wait."""
        self._news.clear()
        await self._drop_useless()
        picked = self._pacer.pick()
        taken = [self._members.pop(group) for group in picked or ()]
        new = [rollout for members in (*self._dropped, *taken) if not members.hopeless for rollout in members.ended]
        if picked is not None or (len(self._dropped) >= self.config.tasks_per_step and is_lost(new)):
            self.check(what, new)
        return None if picked is None else taken

    async def _drop_useless(self) -> None:
        """Take finished groups that teach nothing without counting them, as long as `trainer.max_waves` allows it."""
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
        """A finished group of which it is not known whether it counts, while `left` more may be dropped.

        Looked up anew each time: while an algorithm is asked about one group, others end, and none may be picked unasked.
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
        """Wait for news. Raises what ended the worker."""
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
        """Note what has ended without this process having heard of it."""
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
