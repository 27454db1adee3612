"""A run's course as curves: its metrics over steps, tokens and time, its held-out evaluations, and where its settings changed.

The invariant: numbers are the trainer's own; derived ones (sums over steps, when most of the gain was reached) are named so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
from lightning.safe_text import counted
from lightning.store.protocol import Store
from lightning.trainer.context import read_epochs
from lightning.trainer.gains import margin
from lightning.trainer.runs import changes_of
from lightning.trainer.summary import Evaluation, evaluations
from lightning.types import Json, Run
from lightning_debug.diagnosis import WINDOW, Course, lengths_of

from lightning_console.queries.memo import Memo, stamp_of
from lightning_console.queries.runs import About, about_of, finite, measured, settings_and_tasks

Axis = Literal["step", "tokens", "time"]
AXES: Final[Mapping[Axis, str]] = {"step": "steps", "tokens": "sampled tokens (about)", "time": "wall time (s)"}
MOST_OF: Final = 0.8
"""`gain_of` finds when this share of a run's gain was reached."""
LEAST: Final = 6
"""Steps with a reward that a run needs so that its gain can be read from the training rewards."""
GRID: Final = 100
"""Most points of the mean of several curves."""


@dataclass(frozen=True, slots=True)
class Change:
    """The settings that a resume changed before step `step`, in words."""

    step: int
    changes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Gain:
    """When a run had reached `MOST_OF` of its gain from `before` to `after`: after `steps` steps and `seconds` of training.
    `measure` names the reward that was used."""

    before: float
    after: float
    steps: int
    seconds: float
    measure: str


@dataclass(frozen=True, slots=True)
class Curves:
    """A run's course. `steps` are the numbers of its committed steps, `values[i]` the metrics of step `steps[i]`. `tokens[i]`
    and `seconds[i]` are the sampled tokens and the time up to the end of that step; tokens are an estimate, the measured speed
    times the time of sampling. `phases` are the seconds of each phase of the trainer, over all steps. `start` are the metrics
    that were logged before the first step, such as those of the first evaluation."""

    about: About
    steps: tuple[int, ...]
    values: tuple[Mapping[str, float], ...]
    tokens: tuple[float, ...]
    seconds: tuple[float, ...]
    evaluations: tuple[Evaluation, ...]
    changes: tuple[Change, ...]
    settings: Mapping[str, Json]
    phases: Mapping[str, float]
    start: Mapping[str, float] = field(default_factory=dict)

    def x(self, axis: Axis) -> Sequence[float]:
        """The position of each step on an axis."""
        return self.tokens if axis == "tokens" else self.seconds if axis == "time" else self.steps

    def x_after(self, count: int, axis: Axis) -> float:
        """The position on an axis of an evaluation after `count` steps; 0 before the first step."""
        if axis == "step":
            return float(count)
        done = [x for step, x in zip(self.steps, self.x(axis), strict=True) if step <= count]
        return done[-1] if done else 0.0

    def named(self, name: str) -> list[float | None]:
        """A metric at each step; None if the step lacks it or it is not finite."""
        return [finite(values.get(name)) for values in self.values]

    def course(self, name: str, axis: Axis) -> tuple[list[int], list[float], list[float | None]]:
        """A metric over the steps, as their numbers, their positions on an axis, and its values. It begins with step 0 if the
        metric was logged before the first step."""
        before = [finite(self.start[name])] if name in self.start else []
        zeros = [0] * len(before)
        return [*zeros, *self.steps], [*map(float, zeros), *self.x(axis)], [*before, *self.named(name)]

    @property
    def lengths(self) -> list[float | None]:
        """The mean number of trained tokens of a trained rollout, at each step."""
        return [next(iter(lengths_of(Course([metrics]))), None) for metrics in self.values]

    @property
    def names(self) -> list[str]:
        """The names of all metrics, sorted."""
        return sorted({name for values in self.values for name in values})


_memo: Memo[Curves] = Memo()


async def read_curves(store: Store, run: Run) -> Curves:
    """Read the course of a run, which is kept until the run changes. Raises `StoreError`."""
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
        start=dict(points[0].values) if 0 in points else {},
    )


def total(values: Sequence[float | None]) -> float | None:
    """Return the sum of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def gain_of(curves: Curves) -> Gain | None:
    """Find when most of a run's gain was reached, by its held-out evaluations if it has enough, else by its training rewards.
    None if it gained nothing or has too few values."""
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
        measure = f"reward of training, mean of {counted(window, 'step')}"
    else:
        return None
    before, after = scores[0][1], max(score for _, score in scores)
    if after <= before:
        return None
    count = next(step for step, score in scores if score >= before + MOST_OF * (after - before))
    return Gain(before, after, count, curves.x_after(count, "time"), measure)


def held_out_points(curves: Curves, axis: Axis = "step") -> list[list[float | None]]:
    """Return the held-out evaluations as points `[x, score, low, high]` with their interval of 95 %, or as `[x, score]` where
    it is not known; failed rollouts count as 0."""
    points: list[list[float | None]] = []
    for each in curves.evaluations:
        half = margin(each)
        ends = [] if half is None else [each.score - half, each.score + half]
        points.append([curves.x_after(each.step, axis), each.score, *ends])
    return points


def different_settings(runs: Sequence[Curves]) -> dict[str, list[Json]]:
    """Return the settings in which runs differ, by name, with the value of each run; None if a run does not have the
    setting."""
    names = sorted({name for run in runs for name in run.settings})
    table = {name: [run.settings.get(name) for run in runs] for name in names}
    return {
        name: values
        for name, values in table.items()
        if len({json.dumps(value, sort_keys=True) for value in values}) > 1
    }


def mean_and_spread(curves: Sequence[tuple[Sequence[float], Sequence[float | None]]]) -> list[list[float | None]]:
    """Return the mean of curves `(xs, values)` as points `[x, mean, least, most]`, over the range that all of them cover.
    Between its points a curve is a straight line."""
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
