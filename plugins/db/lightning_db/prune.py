"""Plans and carries out `lightning db prune`: removes calls that nothing reads any more, or whole runs.

The invariant: data that a resumed run would read stays, unless the user says that the run will not be resumed.

A resumed run loads its newest checkpoint, takes the later steps again from the calls of their groups, and goes on with rollouts
that have not ended. The largest `trainer.max_staleness` of the run's config epochs bounds how old the groups of a step can be.
A group of a training whose calls stay may begin behind a rollout of another group, also one of another run: the calls of that
group stay, too, because without them an audit cannot prove the group that begins there, and its requests cannot be read.
Rewards, steps and metrics are small and stay with their run, so that it can still be listed and compared.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
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
Place = tuple[str, str]
"""A run and one of its groups."""


@dataclass(frozen=True, slots=True)
class PruneRequest:
    """What to remove, as the user asks for it.

    `runs` limits it to these runs (empty: all), and `older_than` to runs in which nothing has happened for that many seconds.
    With `whole` runs are removed instead of calls. With `trained` the calls of trained rollouts are removed, too, and an audit
    cannot prove these any more. With `unfinished` data that a run would need to go on is removed, too. None of these is said of
    a run that is not chosen.
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
    with calls that stay in other runs; their requests and answers cannot be read afterwards, because they are stored as
    differences to the removed ones."""

    run: str
    rollouts: int = 0
    trained: int = 0
    groups: tuple[str, ...] = ()
    weight: Weight = NOTHING
    whole: bool = False
    kept: str = ""
    branches: int = 0


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


@dataclass(frozen=True, slots=True)
class _Link:
    """`count` rollouts of the group `child` begin behind rollouts of the group `parent`. `training` says that the child is a
    group of a training."""

    child: Place
    parent: Place
    count: int
    training: bool


async def plan(store: Store, keeper: Keeper, choice: PruneRequest) -> list[RunPlan]:
    """Return what would be removed of each chosen run. Raises `StoreError` for an unknown run."""
    chosen = {run.id for run in await chosen_runs(store, choice.runs)}
    known = await store.list_runs()
    activity, busy, branched = await keeper.activity(), await keeper.busy_runs(), await keeper.branched_runs()
    since = -math.inf if choice.older_than is None else choice.older_than
    taken = [run for run in known if run.id in chosen and time.time() - activity.get(run.id, run.created_at) >= since]
    facts = {run.id: await _facts(store, run, choice, run.id in busy) for run in taken}
    groups = {run: each.groups for run, each in facts.items()}
    groups |= {run.id: await _groups(store, run.id) for run in known if run.id in branched and run.id not in groups}
    kept = {run.id: await _why_kept(store, run, choice, facts[run.id], run.id in busy) for run in taken}
    going = {(run, name) for run, each in facts.items() if not kept[run] for name in each.groups
             if choice.whole or each.spares(name)}  # fmt: skip
    links = await _links(store, keeper, groups, going)
    while needed := [link for link in links if link.training and link.parent in going and link.child not in going]:
        going -= {link.parent for link in needed}
        if choice.whole:
            kept |= _begun_behind(needed)
            going = {place for place in going if not kept[place[0]]}
    left: Counter[str] = Counter()
    for link in links:
        if link.parent in going and link.child not in going and link.child[0] != link.parent[0]:
            left[link.parent[0]] += link.count
    plans: list[RunPlan] = []
    for run in taken:
        names = [name for name in groups[run.id] if (run.id, name) in going]
        item = await _plan_of(keeper, run.id, groups[run.id], names, whole=choice.whole, kept=kept[run.id])
        plans.append(replace(item, branches=left[run.id]))
    return plans


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


async def _why_kept(store: Store, run: Run, choice: PruneRequest, facts: _Facts, busy: bool) -> str:
    """Return why a run cannot be removed as a whole; empty if it can, or if only calls shall be removed."""
    if not choice.whole:
        return ""
    if busy:
        return "somebody works on it"
    if not choice.unfinished:
        if any(not group.ended for group in facts.groups.values()):
            return "some of its rollouts have not ended: --unfinished takes it all the same"
        steps = len(await store.steps(run.id, brief=True))
        planned = (await read_epochs(store, run))[-1].setting("trainer", "steps")
        if isinstance(planned, int) and steps < planned:
            return f"it has {steps} of {planned} steps: --unfinished takes it all the same"
    return ""


async def _plan_of(
    keeper: Keeper, run: str, groups: Mapping[str, _Group], names: Sequence[str], *, whole: bool, kept: str
) -> RunPlan:
    """Return the plan of a run that loses the calls of the groups of these names, or all it has (`whole`), unless it is
    `kept`."""
    if kept:
        return RunPlan(run, kept=kept)
    weights = zip(names, await keeper.weigh(run, names), strict=True)
    heavy = {name: weight for name, weight in weights if whole or weight.calls or weight.spans}
    if not heavy and not whole:
        return RunPlan(run, kept="nothing in it can be spared")
    members = [groups[name] for name in heavy]
    counts = sum(group.rollouts for group in members), sum(group.trained for group in members)
    return RunPlan(run, *counts, () if whole else tuple(heavy), sum(heavy.values(), NOTHING), whole)


async def _facts(store: Store, run: Run, choice: PruneRequest, busy: bool) -> _Facts:
    epochs = await read_epochs(store, run)
    first = None if choice.unfinished and not busy else _first_needed(epochs, await store.steps(run.id))
    return _Facts(await _groups(store, run.id), first, choice.trained)


async def _groups(store: Store, run: str) -> dict[str, _Group]:
    groups: dict[str, _Group] = {}
    async for rollout in each_rollout(store, run):
        groups.setdefault(rollout.group, _Group(rollout.split)).add(rollout)
    return groups


async def _links(
    store: Store, keeper: Keeper, groups: Mapping[str, Mapping[str, _Group]], going: set[Place]
) -> list[_Link]:
    """Return which groups begin behind a rollout whose calls would go. A group that has ended and has no calls is left out:
    nothing of it can be read or proved any more."""
    found: list[_Link] = []
    places: dict[str, Place | None] = {}
    for run, own in groups.items():
        links: list[_Link] = []
        for name, group in own.items():
            for key, count in group.parents.items():
                if key not in places:
                    rollout = await store.get_rollout(key)
                    places[key] = (rollout.run, rollout.group) if rollout is not None else None
                place = places[key]
                if place in going and place is not None:
                    links.append(_Link((run, name), place, count, group.split == TRAIN))
        ended = [name for name in {link.child[1]: None for link in links} if own[name].ended]
        weights = zip(ended, await keeper.weigh(run, ended), strict=True)
        empty = {name for name, weight in weights if not weight.calls}
        found += [link for link in links if link.child[1] not in empty]
    return found


def _begun_behind(needed: Sequence[_Link]) -> dict[str, str]:
    """Return, by run, why runs stay behind whose rollouts groups of other runs begin."""
    runs: dict[str, set[str]] = {}
    for link in needed:
        runs.setdefault(link.parent[0], set()).add(link.child[0])
    return {
        run: f"groups of {', '.join(sorted(others))} begin behind its rollouts: remove {more} together with it, when nobody "
        f"works on {them} (--whole --run {run} {options}), or first the calls of {more} (without --whole: {options} --trained "
        "--unfinished --apply)"
        for run, others in runs.items()
        for more, them in [("that run", "it") if len(others) == 1 else ("these runs", "them")]
        for options in [" ".join(f"--run {other}" for other in sorted(others))]
    }


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
