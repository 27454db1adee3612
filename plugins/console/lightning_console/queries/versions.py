"""The same held-out tasks under two versions: who won, by how much, and where the worst regressions parted.

The invariant: the unit is the task; a rollout that failed counts as the lowest reward, and what the infrastructure lost is
in no figure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from lightning.errors import DataError, LightningError
from lightning.store.pages import each_rollout
from lightning.store.protocol import Store
from lightning.trainer.plan import VAL, newest_generation, of_generation
from lightning.trainer.summary import Evaluation, evaluations
from lightning.types import Json, Rollout, Run
from lightning_debug.ab import DivergentCall, PairedTask, divergent_call, paired_tasks
from lightning_debug.statistics import SequentialTest, interval

from lightning_console.places import Located, Places, key_of
from lightning_console.queries.runs import ODD, said_of

MOST_RUNS: Final = 50
"""Runs whose evaluations are offered: the newest."""
MOST_ROLLOUTS: Final = 50_000
"""Held-out rollouts of one evaluation that are compared."""
SHOWN: Final = 20
"""Regressions that are told with the call at which they part."""


@dataclass(frozen=True, slots=True)
class EvaluatedVersion:
    """A held-out evaluation that can be compared, of a run that began at `created_at`."""

    key: str
    run: str
    created_at: float
    result: Evaluation

    @property
    def name(self) -> str:
        """What an address calls it."""
        return f"{self.key}@{self.result.step}"


@dataclass(frozen=True, slots=True)
class Side:
    """One of two versions that are compared."""

    located: Located
    step: int
    rollouts: int
    mean: float

    @property
    def name(self) -> str:
        """What an address calls it."""
        return f"{self.located.key}@{self.step}"


@dataclass(frozen=True, slots=True)
class Regression:
    """A task on which the second is worse; `call` is where the worst pair parts, None where no call differs, or where that
    could not be read: `unread` says why."""

    task: PairedTask
    input: Json
    call: DivergentCall | None
    unread: str = ""


@dataclass(frozen=True, slots=True)
class VersionComparison:
    """B beside A on the tasks that both were given. `difference` is the mean over tasks of B's reward less A's; `interval` is
    None where rewards lie outside of `bounds`. `anytime` says that it holds however often it was looked at, as an A/B needs.
    `only_a` and `only_b` count tasks that the other was not given, `lost_pairs` what the infrastructure lost."""

    a: Side
    b: Side
    wins: int
    losses: int
    ties: int
    difference: float | None
    interval: tuple[float, float] | None
    bounds: tuple[float, float]
    anytime: bool
    tasks: tuple[PairedTask, ...]
    regressions: tuple[Regression, ...]
    only_a: int
    only_b: int
    lost_pairs: int
    inputs: Mapping[str, Json] = field(default_factory=dict)
    """What each of the tasks asks, by its id."""


async def evaluated_versions(places: Places) -> tuple[list[EvaluatedVersion], dict[str, str]]:
    """The held-out evaluations of the newest runs at a place, and why stores could not be read, by URL."""
    found: list[EvaluatedVersion] = []
    stores = await places.stores()
    unreadable = dict(places.unreadable)
    runs: list[tuple[str, Store, Run]] = []
    for url, store in stores.items():
        try:
            runs += [(url, store, run) for run in await store.list_runs(places.project, limit=MOST_RUNS, brief=True)]
        except LightningError as error:
            unreadable[url] = str(error)
    names = [run.id for _, _, run in runs]
    runs.sort(key=lambda each: -each[2].created_at)
    for url, store, run in runs[:MOST_RUNS]:
        key = key_of(run.id, url if names.count(run.id) > 1 else "")
        try:
            results = await evaluations(store, run.id)
        except ODD as error:
            unreadable[f"{run.id} in {url}"] = said_of(error)
            continue
        found += [EvaluatedVersion(key, run.id, run.created_at, each) for each in results]
    return found, unreadable


async def compare_versions(
    places: Places, one: str, other: str, bounds: tuple[float, float] = (0.0, 1.0)
) -> VersionComparison:
    """Compare two evaluations, each named `KEY@STEP`. Raises `DataError` for one that there is not, and where they share no
    task."""
    (a, run_a), (b, run_b) = await _rollouts(places, one), await _rollouts(places, other)
    tasks_a, tasks_b = _by_task(run_a), _by_task(run_b)
    common = [task for task in tasks_a if task in tasks_b]
    if not common:
        raise DataError(f"{one} and {other} were not given one common task, so that there is nothing to compare")
    paired: list[PairedTask] = []
    lost = 0
    for task in common:
        n = min(len(tasks_a[task]), len(tasks_b[task]))
        for each, gone in paired_tasks(tasks_a[task][:n], tasks_b[task][:n], n, bounds[0]):
            lost += gone
            paired += [each] if each is not None else []
    differences = [each.difference for each in paired]
    anytime = "evaluates" in a.run.config and "evaluates" in b.run.config and a.run.id != b.run.id
    inputs = {task: rollouts[0].task.input for task, rollouts in tasks_a.items()}
    return VersionComparison(
        _side(a, one, run_a, [each.a for each in paired]),
        _side(b, other, run_b, [each.b for each in paired]),
        sum(each > 0 for each in differences),
        sum(each < 0 for each in differences),
        sum(each == 0 for each in differences),
        math.fsum(differences) / len(differences) if differences else None,
        _interval(differences, [*run_a, *run_b], bounds, anytime=anytime),
        bounds,
        anytime,
        tuple(paired),
        tuple(await _regressions(a, b, paired, inputs)),
        len(tasks_a) - len(common),
        len(tasks_b) - len(common),
        lost,
        inputs,
    )


async def _rollouts(places: Places, name: str) -> tuple[Located, list[Rollout]]:
    """The ended rollouts of an evaluation, as the run's latest try at it has them."""
    key, at, step = name.rpartition("@")
    if not at or not step.isdecimal():
        raise DataError(f"{name[:200]!r} names no evaluation: RUN@STEP, such as my-run@10")
    located = await places.find(key)
    found: list[Rollout] = []
    async for rollout in each_rollout(located.store, located.run.id, split=VAL, step=int(step)):
        found.append(rollout)
        if len(found) > MOST_ROLLOUTS:
            raise DataError(f"{name} has more than {MOST_ROLLOUTS} rollouts, which is too many for a page")
    ended = [rollout for rollout in of_generation(found, newest_generation(found)) if rollout.status.ended]
    if not ended:
        raise DataError(f"the run {located.run.id} has no held-out rollouts after {step} steps that have ended")
    return located, ended


def _by_task(rollouts: Sequence[Rollout]) -> dict[str, list[Rollout]]:
    found: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        found.setdefault(rollout.task.id, []).append(rollout)
    return {task: sorted(own, key=lambda each: (each.index, each.id)) for task, own in found.items()}


def _side(located: Located, name: str, rollouts: Sequence[Rollout], means: Sequence[float]) -> Side:
    return Side(located, int(name.rpartition("@")[2]), len(rollouts), math.fsum(means) / max(len(means), 1))


def _interval(
    differences: Sequence[float], rollouts: Sequence[Rollout], bounds: tuple[float, float], *, anytime: bool
) -> tuple[float, float] | None:
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    width = bounds[1] - bounds[0]
    if (
        not differences
        or width <= 0
        or min(rewards, default=bounds[0]) < bounds[0]
        or max(rewards, default=0) > bounds[1]
    ):
        return None
    inside = np.clip(np.array(differences, dtype=np.float64), -width, width)  # a mean may be beyond by rounding
    if anytime:
        test = SequentialTest(-width, width)
        test.add(inside.tolist())
        return test.interval
    low, high = interval((inside / width + 1.0) / 2.0)
    return (2.0 * low - 1.0) * width, (2.0 * high - 1.0) * width


async def _regressions(
    a: Located, b: Located, paired: Sequence[PairedTask], inputs: Mapping[str, Json]
) -> list[Regression]:
    found = []
    for each in sorted((each for each in paired if each.difference < 0), key=lambda one: one.difference)[:SHOWN]:
        try:
            call, unread = await divergent_call(a.store, each.rollout_a, each.rollout_b, b.store), ""
        except LightningError as error:
            call, unread = None, str(error)
        found.append(Regression(each, inputs[each.task], call, unread))
    return found
