"""Plans and carries out `lightning db prune`: removes calls that nothing reads any more, or whole runs.

The invariant: data that a resumed run would read stays, unless the user says that the run will not be resumed.

A resumed run loads its newest checkpoint, takes the later steps again from the calls of their groups, and goes on with rollouts
that have not ended. The largest `trainer.max_staleness` of the run's config epochs bounds how old the groups of a step can be.
A group whose calls stay may begin behind a rollout of an older group, or of another run (`trainer.sampling = prefix`): the
calls of that group stay, too, because without them an audit cannot prove the younger group, and its requests cannot be read.
Rewards, steps and metrics are small and stay with their run, so that it can still be listed and compared.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from lightning.store.pages import each_rollout
from lightning.store.protocol import PRUNED, Store
from lightning.trainer.context import Epoch, read_epochs
from lightning.trainer.plan import TRAIN
from lightning.types import Json, Rollout, Run, StepRecord

from lightning_db.export import chosen_runs
from lightning_db.keeper import Keeper, Weight

NOTHING: Final = Weight()


@dataclass(frozen=True, slots=True)
class PruneRequest:
    """What to remove, as the user asks for it.

    `runs` limits it to these runs (empty: all), and `older_than` to runs in which nothing has happened for that many seconds.
    With `whole` runs are removed instead of calls. With `trained` the calls of trained rollouts are removed, too, and an audit
    cannot prove these any more. With `unfinished` data that a run would need to go on is removed, too.
    """

    runs: tuple[str, ...] = ()
    older_than: float | None = None
    whole: bool = False
    trained: bool = False
    unfinished: bool = False


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What would be removed of one run: all of it (`whole`), or the calls of `groups`. `rollouts` and `trained` count their
    rollouts and the trained ones among them. `kept` says why nothing is removed. `branches` counts branches of its rollouts
    that stay in other runs; their requests and answers cannot be read afterwards, because they are stored as differences to the
    removed ones."""

    run: str
    rollouts: int = 0
    trained: int = 0
    groups: tuple[str, ...] = ()
    weight: Weight = NOTHING
    whole: bool = False
    kept: str = ""
    branches: int = 0

    def takes(self, group: str) -> bool:
        """Return whether the calls of a group of the run would be removed."""
        return self.whole or group in self.groups


@dataclass(slots=True)
class _Group:
    """The facts about a group that decide whether its calls may be removed. `parents` counts its branches by their parent."""

    split: str
    rollouts: int = 0
    trained: int = 0
    step: int = 0
    ended: bool = True
    parents: Counter[str] = field(default_factory=Counter)

    def add(self, rollout: Rollout) -> None:
        self.rollouts += 1
        self.step = max(self.step, rollout.step)
        self.ended &= rollout.status.ended
        self.trained += rollout.trained_at_step is not None
        if rollout.parent is not None:
            self.parents[rollout.parent[0]] += 1


@dataclass(frozen=True, slots=True)
class _Facts:
    """The groups of a run by name, and the first step whose calls a resumed run may read; None if the run will not be
    resumed. With `trained` the calls of trained rollouts may go."""

    groups: Mapping[str, _Group]
    first: int | None
    trained: bool

    def spares(self, name: str) -> bool:
        """Return whether the run can do without the calls of a group."""
        group = self.groups[name]
        return group.ended and (self.trained or not group.trained) and (self.first is None or group.step < self.first)


async def plan(store: Store, keeper: Keeper, choice: PruneRequest) -> list[RunPlan]:
    """Return what would be removed of each chosen run. Raises `StoreError` for an unknown run."""
    chosen = {run.id for run in await chosen_runs(store, choice.runs)}
    known = await store.list_runs()
    activity, busy = await keeper.activity(), await keeper.busy_runs()
    since = -math.inf if choice.older_than is None else choice.older_than
    taken = [run for run in known if run.id in chosen and time.time() - activity.get(run.id, run.created_at) >= since]
    oldest = min((run.created_at for run in taken), default=math.inf)
    younger = [run for run in known if run.created_at >= oldest]  # a branch is younger than its parent
    facts = {run.id: await _facts(store, run, choice, run.id in busy) for run in younger}
    parents = {name: await store.get_rollout(name) for each in facts.values() for name in _parents_in(each)}
    needed = _needed(facts, parents)
    plans = [
        await _plan_whole(store, keeper, run, choice, facts[run.id], run.id in busy)
        if choice.whole
        else await _plan_calls(keeper, run, facts[run.id], needed)
        for run in taken
    ]
    left = _branches_left(facts, parents, {item.run: item for item in plans})
    return [replace(item, branches=left[item.run]) for item in plans]


async def carry_out(store: Store, keeper: Keeper, plans: Sequence[RunPlan]) -> None:
    """Remove the planned data. The state of a run that loses calls records this first.

    Whole runs are removed last and after closing the store, because SQLite's keeper needs the file for itself.
    """
    for item in plans:
        if item.groups:
            await store.put_state(item.run, PRUNED, _told(item, await store.get_state(item.run, PRUNED)))
            await keeper.forget_calls(item.run, item.groups)
    whole = [item.run for item in plans if item.whole]
    if whole:
        await store.close()
    for run in whole:
        await keeper.forget_run(run)


async def _plan_whole(
    store: Store, keeper: Keeper, run: Run, choice: PruneRequest, facts: _Facts, busy: bool
) -> RunPlan:
    if busy:
        return RunPlan(run.id, kept="somebody works on it")
    if not choice.unfinished:
        steps = len(await store.steps(run.id, brief=True))
        planned = (await read_epochs(store, run))[-1].setting("trainer", "steps")
        if any(not group.ended for group in facts.groups.values()):
            return RunPlan(run.id, kept="some of its rollouts have not ended: --unfinished takes it all the same")
        if isinstance(planned, int) and steps < planned:
            return RunPlan(run.id, kept=f"it has {steps} of {planned} steps: --unfinished takes it all the same")
    weight = sum(await keeper.weigh(run.id, list(facts.groups)), NOTHING)
    members = facts.groups.values()
    counts = sum(group.rollouts for group in members), sum(group.trained for group in members)
    return RunPlan(run.id, *counts, weight=weight, whole=True)


async def _plan_calls(keeper: Keeper, run: Run, facts: _Facts, needed: Collection[tuple[str, str]]) -> RunPlan:
    free = [name for name in facts.groups if facts.spares(name) and (run.id, name) not in needed]
    weights = zip(free, await keeper.weigh(run.id, free), strict=True)
    heavy = {name: weight for name, weight in weights if weight.calls or weight.spans}
    if not heavy:
        return RunPlan(run.id, kept="nothing in it can be spared")
    members = [facts.groups[name] for name in heavy]
    counts = sum(group.rollouts for group in members), sum(group.trained for group in members)
    return RunPlan(run.id, *counts, groups=tuple(heavy), weight=sum(heavy.values(), NOTHING))


async def _facts(store: Store, run: Run, choice: PruneRequest, busy: bool) -> _Facts:
    groups: dict[str, _Group] = {}
    async for rollout in each_rollout(store, run.id):
        groups.setdefault(rollout.group, _Group(rollout.split)).add(rollout)
    epochs = await read_epochs(store, run)
    first = None if choice.unfinished and not busy else _first_needed(epochs, await store.steps(run.id))
    return _Facts(groups, first, choice.trained)


def _parents_in(facts: _Facts) -> Iterator[str]:
    for group in facts.groups.values():
        yield from group.parents


def _needed(facts: Mapping[str, _Facts], parents: Mapping[str, Rollout | None]) -> set[tuple[str, str]]:
    """Return the run and the name of each group behind which a group of a training begins that its run cannot do without."""
    return {
        (parent.run, parent.group)
        for each in facts.values()
        for name, group in each.groups.items()
        if group.split == TRAIN and not each.spares(name)
        for parent in map(parents.get, group.parents)
        if parent is not None
    }


def _branches_left(
    facts: Mapping[str, _Facts], parents: Mapping[str, Rollout | None], plans: Mapping[str, RunPlan]
) -> Counter[str]:
    """Count, for each run, the branches in other runs whose calls stay although the calls of their parents would be removed."""
    left: Counter[str] = Counter()
    for run, each in facts.items():
        for name, group in each.groups.items():
            if run in plans and plans[run].takes(name):
                continue
            for parent, count in ((parents[key], count) for key, count in group.parents.items()):
                if parent is not None and parent.run != run and parent.run in plans:
                    left[parent.run] += count * plans[parent.run].takes(parent.group)
    return left


def _first_needed(epochs: Sequence[Epoch], records: Sequence[StepRecord]) -> int:
    """Return the first step whose rollouts' calls a resumed run may read; 0 for a run without a checkpoint, which may read
    all."""
    names = [record.checkpoint.rpartition("-")[2] for record in records]  # step-00000012
    saved = max((int(steps) for steps in names if steps), default=0)
    return saved + 1 - max(epoch.max_staleness or 0 for epoch in epochs) if saved else 0


def _told(item: RunPlan, earlier: Json) -> Json:
    """Return the value of the state's `PRUNED` after this plan; `earlier` is the present value."""
    before = earlier if isinstance(earlier, Mapping) else {}
    count = before.get("rollouts", 0)
    return {
        "at": time.time(),
        "rollouts": item.rollouts + (count if isinstance(count, int) else 0),
        "trained": bool(item.trained or before.get("trained")),
    }
