"""Plans and carries out `lightning db prune`: removes calls that nothing reads any more, or whole runs.

The invariant: data that a resumed run would read stays, unless the user says that the run will not be resumed.

A resumed run loads its newest checkpoint, takes the later steps again from the calls of their groups, and goes on with rollouts
that have not ended. The largest `trainer.max_staleness` of the run's config epochs bounds how old the groups of a step can be.
Rewards, steps and metrics are small and stay with their run, so that it can still be listed and compared.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from lightning.store.pages import each_rollout
from lightning.store.protocol import PRUNED, Store
from lightning.trainer.context import Epoch, read_epochs
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
    """The facts about a group that decide whether its calls may be removed."""

    rollouts: int = 0
    trained: int = 0
    step: int = 0
    ended: bool = True

    def add(self, rollout: Rollout) -> None:
        self.rollouts += 1
        self.step = max(self.step, rollout.step)
        self.ended &= rollout.status.ended
        self.trained += rollout.trained_at_step is not None


async def plan(store: Store, keeper: Keeper, choice: PruneRequest) -> list[RunPlan]:
    """Return what would be removed of each chosen run. Raises `StoreError` for an unknown run."""
    chosen = {run.id for run in await chosen_runs(store, choice.runs)}
    known = await store.list_runs()
    activity, busy = await keeper.activity(), await keeper.busy_runs()
    plans = []
    for run in known:
        if run.id not in chosen:
            continue
        if choice.older_than is not None and time.time() - activity.get(run.id, run.created_at) < choice.older_than:
            continue
        plans.append(await (_plan_whole if choice.whole else _plan_calls)(store, keeper, run, choice, run.id in busy))
    left = await _branches_left(store, known, {item.run: item for item in plans})
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


async def _plan_whole(store: Store, keeper: Keeper, run: Run, choice: PruneRequest, busy: bool) -> RunPlan:
    if busy:
        return RunPlan(run.id, kept="somebody works on it")
    groups = await _groups(store, run.id)
    if not choice.unfinished:
        steps = len(await store.steps(run.id, brief=True))
        planned = (await read_epochs(store, run))[-1].setting("trainer", "steps")
        if any(not group.ended for group in groups.values()):
            return RunPlan(run.id, kept="some of its rollouts have not ended: --unfinished takes it all the same")
        if isinstance(planned, int) and steps < planned:
            return RunPlan(run.id, kept=f"it has {steps} of {planned} steps: --unfinished takes it all the same")
    weight = sum(await keeper.weigh(run.id, list(groups)), NOTHING)
    members = groups.values()
    counts = sum(group.rollouts for group in members), sum(group.trained for group in members)
    return RunPlan(run.id, *counts, weight=weight, whole=True)


async def _plan_calls(store: Store, keeper: Keeper, run: Run, choice: PruneRequest, busy: bool) -> RunPlan:
    groups = await _groups(store, run.id)
    epochs = await read_epochs(store, run)
    first = None if choice.unfinished and not busy else _first_needed(epochs, await store.steps(run.id))
    free = [
        name
        for name, group in groups.items()
        if group.ended and (choice.trained or not group.trained) and (first is None or group.step < first)
    ]
    weights = zip(free, await keeper.weigh(run.id, free), strict=True)
    heavy = {name: weight for name, weight in weights if weight.calls or weight.spans}
    if not heavy:
        return RunPlan(run.id, kept="nothing in it can be spared")
    members = [groups[name] for name in heavy]
    counts = sum(group.rollouts for group in members), sum(group.trained for group in members)
    return RunPlan(run.id, *counts, groups=tuple(heavy), weight=sum(heavy.values(), NOTHING))


async def _branches_left(store: Store, known: Sequence[Run], plans: Mapping[str, RunPlan]) -> Counter[str]:
    """Count, for each run, the branches in other runs whose calls stay although the calls of their parents would be removed."""
    left: Counter[str] = Counter()
    if not any(item.whole or item.groups for item in plans.values()):
        return left
    for run in known:
        first = (await store.list_rollouts(run.id, limit=1)).items
        if not first or first[0].parent is None:  # not a run of `lightning branch`
            continue
        kept: Counter[str] = Counter()
        async for branch in each_rollout(store, run.id):
            if branch.parent is not None and not (run.id in plans and plans[run.id].takes(branch.group)):
                kept[branch.parent[0]] += 1
        for name, count in kept.items():
            parent = await store.get_rollout(name)
            if parent is not None and parent.run != run.id and parent.run in plans:
                left[parent.run] += count * plans[parent.run].takes(parent.group)
    return left


def _first_needed(epochs: Sequence[Epoch], records: Sequence[StepRecord]) -> int:
    """Return the first step whose rollouts' calls a resumed run may read; 0 for a run without a checkpoint, which may read
    all."""
    names = [record.checkpoint.rpartition("-")[2] for record in records]  # step-00000012
    saved = max((int(steps) for steps in names if steps), default=0)
    return saved + 1 - max(epoch.max_staleness or 0 for epoch in epochs) if saved else 0


async def _groups(store: Store, run: str) -> dict[str, _Group]:
    groups: dict[str, _Group] = {}
    async for rollout in each_rollout(store, run):
        groups.setdefault(rollout.group, _Group()).add(rollout)
    return groups


def _told(item: RunPlan, earlier: Json) -> Json:
    """Return the value of the state's `PRUNED` after this plan; `earlier` is the present value."""
    before = earlier if isinstance(earlier, Mapping) else {}
    count = before.get("rollouts", 0)
    return {
        "at": time.time(),
        "rollouts": item.rollouts + (count if isinstance(count, int) else 0),
        "trained": bool(item.trained or before.get("trained")),
    }
