"""A run's course as curves: its metrics over steps, tokens and time, its held-out evaluations, and where its settings changed.

The invariant: a number is the trainer's own. What is derived (sums over steps, when most of the gain was reached) is named so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from lightning.store.protocol import Store
from lightning.trainer.epochs import read_epochs
from lightning.trainer.runs import changes_of
from lightning.trainer.summary import Evaluation, evaluations
from lightning.types import Json, Run
from lightning_debug.diagnosis import WINDOW, Course, lengths_of

from lightning_console.queries.memo import Memo, stamp_of
from lightning_console.queries.runs import About, about_of, finite, measured, settings_and_tasks

Axis = Literal["step", "tokens", "time"]
AXES: Final[Mapping[Axis, str]] = {"step": "steps", "tokens": "sampled tokens (about)", "time": "wall time (s)"}
MOST_OF: Final = 0.8
"""The share of the gain that is asked for: when was most of it there?"""
LEAST: Final = 6
"""Steps that a run has at least whose gain is looked at."""
GRID: Final = 100
"""Points of the mean of several curves, at most."""
LEVEL: Final = 1.96
"""Standard errors on both sides of a held-out mean: its interval of 95 %."""


@dataclass(frozen=True, slots=True)
class Change:
    """Settings that changed before step `step`, in words."""

    step: int
    changes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Gain:
    """When `MOST_OF` of what a run gained was there: after so many `steps` and `seconds` of training. `measure` is what was
    looked at."""

    before: float
    after: float
    steps: int
    seconds: float
    measure: str


@dataclass(frozen=True, slots=True)
class Curves:
    """A run's course. `steps` are the numbers of its committed steps, `values[i]` the metrics of step `steps[i]`; `tokens[i]`
    and `seconds[i]` say how many tokens were sampled and how long the steps took up to the end of it, where the first is about:
    what the trainer measured of its speed, times how long it sampled."""

    about: About
    steps: tuple[int, ...]
    values: tuple[Mapping[str, float], ...]
    tokens: tuple[float, ...]
    seconds: tuple[float, ...]
    evaluations: tuple[Evaluation, ...]
    changes: tuple[Change, ...]
    settings: Mapping[str, Json]
    phases: Mapping[str, float]

    def x(self, axis: Axis) -> Sequence[float]:
        """Where the steps are on an axis."""
        return self.tokens if axis == "tokens" else self.seconds if axis == "time" else self.steps

    def x_after(self, count: int, axis: Axis) -> float:
        """Where an evaluation after `count` steps is on an axis. That before the first step is at 0."""
        if axis == "step":
            return float(count)
        done = [x for step, x in zip(self.steps, self.x(axis), strict=True) if step <= count]
        return done[-1] if done else 0.0

    def named(self, name: str) -> list[float | None]:
        """A metric of each step; None where a step has none, or no finite one."""
        return [finite(values.get(name)) for values in self.values]

    @property
    def lengths(self) -> list[float | None]:
        """Trained tokens for each rollout that was used, by step."""
        return [next(iter(lengths_of(Course([metrics]))), None) for metrics in self.values]

    @property
    def names(self) -> list[str]:
        """The metrics there are."""
        return sorted({name for values in self.values for name in values})


_memo: Memo[Curves] = Memo()


async def read_curves(store: Store, run: Run) -> Curves:
    """The course of a run, kept while it does not change. Raises `StoreError`."""
    return await _memo.get(store, (run.id, run.created_at), await stamp_of(store, run.id), lambda: _read(store, run))


async def _read(store: Store, run: Run) -> Curves:
    records = await store.steps(run.id, brief=True)
    points = {point.step: point for point in await store.metrics(run.id)}
    whole = run if run.config else await store.get_run(run.id) or run
    epochs = await read_epochs(store, whole)
    tokens, seconds, values = 0.0, 0.0, []
    sums: list[tuple[float, float]] = []
    phases: dict[str, float] = {}
    for name, value in (each for point in points.values() for each in point.values.items()):
        if name.startswith("seconds/"):
            phases[name.partition("/")[2]] = phases.get(name.partition("/")[2], 0.0) + value
    for record in records:
        point = points.get(record.step)
        metrics = {name: value for name, value in record.metrics.items() if isinstance(value, int | float)}
        metrics |= point.values if point else {}
        took = {name.partition("/")[2]: value for name, value in metrics.items() if name.startswith("seconds/")}
        sampling = sum(took.values()) if "pipeline/groups_begun" in metrics else took.get("rollout", 0.0)
        speed = metrics.get("tokens_per_second", 0.0)
        tokens += speed * sampling if math.isfinite(speed) else 0.0
        seconds += sum(took.values())
        values.append(metrics)
        sums.append((tokens, seconds))
    return Curves(
        about=await about_of(store, whole),
        steps=tuple(record.step for record in records),
        values=tuple(values),
        tokens=tuple(each[0] for each in sums),
        seconds=tuple(each[1] for each in sums),
        evaluations=measured(await evaluations(store, run.id)),
        changes=tuple(Change(each.first, tuple(changes_of(epochs, each.number))) for each in epochs[1:]),
        settings=settings_and_tasks(epochs[-1].config) if whole.config else {},
        phases=phases,
    )


def total(values: Sequence[float | None]) -> float | None:
    """The sum of those that are known; None where none is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def gain_of(curves: Curves) -> Gain | None:
    """When most of a run's gain was there. None where there was none, or where too little was measured to say so."""
    known = [
        (step, reward)
        for step, value in zip(curves.steps, curves.values, strict=True)
        if (reward := value.get("reward_with_failures", value.get("reward"))) is not None and math.isfinite(reward)
    ]
    rewards = [reward for _, reward in known]
    if len(curves.evaluations) > WINDOW:
        scores = [(each.step, each.score) for each in curves.evaluations]
        measure = "held-out"
    elif len(rewards) >= LEAST:
        window = min(WINDOW, len(rewards) // 3 + 1)
        smooth = np.convolve(rewards, np.ones(window) / window, mode="valid")
        scores = [(known[place + window - 1][0], float(value)) for place, value in enumerate(smooth)]
        measure = f"reward of training, mean of {window} steps"
    else:
        return None
    before, after = scores[0][1], max(score for _, score in scores)
    if after <= before:
        return None
    count = next(step for step, score in scores if score >= before + MOST_OF * (after - before))
    return Gain(before, after, count, curves.x_after(count, "time"), measure)


def held_out_points(curves: Curves, axis: Axis = "step") -> list[list[float | None]]:
    """The held-out evaluations as points with their interval of 95 %, failed rollouts as 0."""
    return [
        [curves.x_after(each.step, axis), each.score, each.score - LEVEL * each.error, each.score + LEVEL * each.error]
        for each in curves.evaluations
    ]


def different_settings(runs: Sequence[Curves]) -> dict[str, list[Json]]:
    """The settings in which runs differ, by name, with the value of each run; None for one that does not have it."""
    names = sorted({name for run in runs for name in run.settings})
    table = {name: [run.settings.get(name) for run in runs] for name in names}
    return {
        name: values
        for name, values in table.items()
        if len({json.dumps(value, sort_keys=True) for value in values}) > 1
    }


def mean_and_spread(curves: Sequence[tuple[Sequence[float], Sequence[float | None]]]) -> list[list[float | None]]:
    """The mean of curves `(xs, values)` with the least and the most of them, over where all of them are. Between its points a
    curve is straight."""
    known = [_known(xs, values) for xs, values in curves]
    known = [each for each in known if len(each[0])]
    if not known:
        return []
    first, last = max(xs[0] for xs, _ in known), min(xs[-1] for xs, _ in known)
    if last < first:
        return []
    places = sorted({float(x) for xs, _ in known for x in xs if first <= x <= last})
    grid = np.array(places if len(places) <= GRID else np.linspace(first, last, GRID))
    together = np.stack([np.interp(grid, xs, values) for xs, values in known])
    return [
        [float(x), float(column.mean()), float(column.min()), float(column.max())]
        for x, column in zip(grid, together.T, strict=True)
    ]


def _known(xs: Sequence[float], values: Sequence[float | None]) -> tuple[list[float], list[float]]:
    pairs = [(float(x), value) for x, value in zip(xs, values, strict=True) if value is not None]
    return [x for x, _ in pairs], [value for _, value in pairs]
