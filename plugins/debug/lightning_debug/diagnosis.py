"""Inputs and results of the rules: records of attempts, the course of a run, and measures of change in it.

The invariant: a finding names the steps or rollouts that it rests on. The noise of a step is estimated from the differences
between neighbouring steps, so that a trend does not count as noise.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
from lightning.batch import Trajectory
from lightning.engines.logprob_gap import FLOAT32, GapBound
from lightning.trainer.stages import Alarm
from lightning.trainer.summary import POLICY_FAULT, Evaluation
from lightning.types import Status, ToolEvent, Transition

if TYPE_CHECKING:
    from lightning.policy_server.policies import PolicySet
    from lightning_policies.config import PolicyConfig


@dataclass(frozen=True, slots=True)
class Diagnosis(Alarm):
    """A finding of a rule. A `minor` one is shown by a dry run, or as a hint of `lightning advise`, and is no alarm."""

    minor: bool = False


@dataclass(frozen=True, slots=True)
class Attempted:
    """The model calls of an attempt, refused and failed ones included, and its reported tool runs; `reward` is None and `group`
    empty if not known. `parts` are the named parts of the reward."""

    calls: Sequence[Transition]
    tool_events: Sequence[ToolEvent]
    reward: float | None = None
    group: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, trajectory: Trajectory) -> Attempted:
        """Make it from a trajectory; the reward is None unless its rollout succeeded."""
        rollout = trajectory.rollout
        reward = rollout.reward if rollout.status is Status.SUCCEEDED else None
        parts = {name: value for name, value in rollout.rewards.items() if name != "reward"}
        calls = (*trajectory.transitions, *trajectory.refused)
        return cls(calls, trajectory.tool_events, reward, rollout.group, parts)


@dataclass(frozen=True, slots=True)
class Course:
    """The metrics of a run's steps, from the first one on, and its held-out evaluations so far. `gap` is the bound on the
    difference between trainer and sampler. `order` is `trainer.order`: unless it is `shuffled`, the training reward also
    depends on the choice of tasks. `turns` are those of `turns_of`."""

    steps: Sequence[Mapping[str, float]] = ()
    evaluations: Sequence[Evaluation] = ()
    gap: GapBound = FLOAT32
    order: str = "shuffled"
    turns: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @property
    def measured(self) -> list[Evaluation]:
        """The evaluations of these steps that have a result."""
        return [result for result in self.evaluations if result.known and result.step <= len(self.steps)]

    @property
    def last(self) -> Mapping[str, float]:
        """The metrics of the last step; empty before the first."""
        return self.steps[-1] if self.steps else {}


@dataclass(frozen=True, slots=True)
class Evidence:
    """The input of the rules over attempts: the attempts, the globs of the trained agents (`train_agents`), the errors of
    failed rollouts, and the policies by name, if the run has several."""

    attempts: Sequence[Attempted] = ()
    train_agents: Sequence[str] = ()
    failures: Sequence[str] = ()
    policies: Mapping[str, PolicyConfig] = field(default_factory=dict)

    @property
    def answered(self) -> Iterator[Transition]:
        """The answered calls of all attempts."""
        return (call for attempt in self.attempts for call in attempt.calls if call.status.answered)


WINDOW: Final = 5
"""Number of steps that a mean is taken over."""
LEAST: Final = 2 * WINDOW
"""Least number of steps for a comparison of the first window with the last."""
FLAT_AFTER: Final = 20
"""Least number of steps after which a reward that has not moved is called flat."""
SMALL: Final = 0.15
"""A reward is flat if a whole run has moved it by less than this part of its size."""


def turns_of(policies: PolicySet | None, first: int, last: int) -> dict[str, list[int]]:
    """Return, of the steps from `first` to `last`, the last `WINDOW` that were to train each policy, by its name; empty for a
    run with one policy."""
    found: dict[str, list[int]] = {} if policies is None else {name: [] for name in policies.adapters}
    for step in range(last, first - 1, -1):
        if policies is None or all(len(turns) == WINDOW for turns in found.values()):
            break
        resting = policies.resting(step)
        for name, turns in found.items():
            if name not in resting and len(turns) < WINDOW:
                turns.insert(0, step)
    return found


def is_now(course: Course, step: int) -> bool:
    """Return whether a step is among the last `WINDOW` ones; an earlier problem that has passed is no finding."""
    return step > len(course.steps) - WINDOW


def last_steps(course: Course, count: int = WINDOW) -> tuple[int, ...]:
    """Return the numbers of the last steps, at most `count`."""
    return tuple(range(max(0, len(course.steps) - count) + 1, len(course.steps) + 1))


def known_of(course: Course, *names: str) -> list[tuple[int, float]]:
    """Return `(step, value)` for each step with a finite metric, under the first of `names` that the step has."""
    found = []
    for step, metrics in enumerate(course.steps, 1):
        value = next((metrics[name] for name in names if name in metrics), math.nan)
        if math.isfinite(value):
            found.append((step, value))
    return found


def values_of(course: Course, *names: str) -> list[float]:
    """Return the values of a metric in the steps that have it (see `known_of`)."""
    return [value for _, value in known_of(course, *names)]


def change_of(values: Sequence[float]) -> tuple[float, float, float] | None:
    """Return the means of the first and the last window, and by how many standard errors they differ; None for fewer than
    `LEAST` values."""
    if len(values) < LEAST:
        return None
    early, late = mean_of(values[:WINDOW]), mean_of(values[-WINDOW:])
    error = noise_of(values) * math.sqrt(2 / WINDOW)
    difference = abs(late - early)
    return early, late, math.inf if not error and difference else difference / error if error else 0.0


def noise_of(values: Sequence[float]) -> float:
    """Return the standard deviation of a step's value about the trend, estimated from the differences between neighbours."""
    return float(np.std(np.diff(values)) / math.sqrt(2)) if len(values) > 2 else 0.0


def mean_around(known: Sequence[tuple[int, float]], step: int) -> float:
    """Return the mean of the `WINDOW` values around a step; `known` has `(step, value)`."""
    before = sum(place <= step for place, _ in known)
    first = min(max(0, before - WINDOW // 2), max(0, len(known) - WINDOW))
    return mean_of([value for _, value in known[first : first + WINDOW]])


def mean_of(values: Sequence[float]) -> float:
    """Return the mean of values; NaN for none, so that every comparison with it is false."""
    return float(np.mean(values)) if len(values) else math.nan


def failed_share(metrics: Mapping[str, float]) -> float | None:
    """Return the share of a step's rollouts that failed; None if the step has no rollouts."""
    rollouts = metrics.get("rollouts")
    return metrics.get("failed", 0.0) / rollouts if rollouts else None


def policy_fault_share(metrics: Mapping[str, float]) -> float | None:
    """Return the share of a step's rollouts that failed by the policy's own fault; None if the step has no rollouts."""
    failed = sum(value for name, value in metrics.items() if name.startswith(POLICY_FAULT))
    rollouts = metrics.get("rollouts")
    return failed / rollouts if rollouts else None


def policy_fault_causes(course: Course) -> str:
    """Name the policy's own faults in the last steps with their counts, the commonest first."""
    counts: Counter[str] = Counter()
    for metrics in course.steps[-WINDOW:]:
        counts.update({name: round(value) for name, value in metrics.items() if name.startswith(POLICY_FAULT)})
    return ", ".join(f"{name.removeprefix(POLICY_FAULT)} {count}" for name, count in counts.most_common())


def lengths_of(course: Course) -> list[float]:
    """Return the mean number of trained tokens of a trained rollout, by step; steps that trained none are left out."""
    return [
        metrics["tokens"] / metrics["rollouts_trained"]
        for metrics in course.steps
        if metrics.get("tokens") and metrics.get("rollouts_trained")
    ]


def is_solved(course: Course) -> bool:
    """Return whether little is left to earn: rollouts hardly differ, since the mean reward is near the highest value of mean
    plus deviation that a step has had."""
    rewards = known_of(course, "reward_with_failures", "reward")
    deviations = dict(known_of(course, "reward_std"))
    pairs = [(reward, deviations[step]) for step, reward in rewards if step in deviations]
    if len(pairs) < WINDOW:
        return False
    most = max(reward + deviation for reward, deviation in pairs)
    least = min(reward - deviation for reward, deviation in pairs)
    now = mean_of([reward for _, reward in rewards[-WINDOW:]])
    return now >= most - 0.2 * (most - least) if most > least else now > 0
