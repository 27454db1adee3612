"""What rules look at, and what they find: the record of some attempts, and the course of a run with what changes in it.

The invariant: a finding says on what it rests, so that whoever reads it can look there. The noise of a step is taken from what
neighbouring steps differ by, so that a trend is no noise.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from lightning.batch import Trajectory
from lightning.engines.logprob_gap import FLOAT32, GapBound
from lightning.trainer.stages import Alarm
from lightning.trainer.summary import POLICY_FAULT, Evaluation
from lightning.types import Status, ToolEvent, Transition


@dataclass(frozen=True, slots=True)
class Diagnosis(Alarm):
    """An alarm that a rule has given. A `minor` one is worth a word in a dry run alone."""

    minor: bool = False


@dataclass(frozen=True, slots=True)
class Attempted:
    """The model calls of an attempt, refused and failed ones included, and the tool runs that were reported; its reward and its
    group where these are known."""

    calls: Sequence[Transition]
    tool_events: Sequence[ToolEvent]
    reward: float | None = None
    group: str = ""

    @classmethod
    def of(cls, trajectory: Trajectory) -> Attempted:
        """What a trajectory has of it."""
        rollout = trajectory.rollout
        reward = rollout.reward if rollout.status is Status.SUCCEEDED else None
        return cls((*trajectory.transitions, *trajectory.refused), trajectory.tool_events, reward, rollout.group)


@dataclass(frozen=True, slots=True)
class Course:
    """The metrics of a run's steps, from the first one on, and its held-out evaluations so far. `gap` is the bound on what
    trainer and sampler may differ by. Where the `order` of the tasks is not `shuffled`, the training reward follows the choice
    of tasks, too."""

    steps: Sequence[Mapping[str, float]] = ()
    evaluations: Sequence[Evaluation] = ()
    gap: GapBound = FLOAT32
    order: str = "shuffled"

    @property
    def measured(self) -> list[Evaluation]:
        """The evaluations that say something of these steps."""
        return [result for result in self.evaluations if result.known and result.step <= len(self.steps)]

    @property
    def last(self) -> Mapping[str, float]:
        """The metrics of the last step; empty before the first."""
        return self.steps[-1] if self.steps else {}


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the rules look at in some attempts: them, the globs of the agents that are trained, and the errors of rollouts that
    failed."""

    attempts: Sequence[Attempted] = ()
    train_agents: Sequence[str] = ()
    failures: Sequence[str] = ()

    @property
    def answered(self) -> Iterator[Transition]:
        """The calls that were answered."""
        return (call for attempt in self.attempts for call in attempt.calls if call.status.answered)


WINDOW: Final = 5
"""Steps of which a mean is taken."""
LEAST: Final = 2 * WINDOW
"""Steps that a comparison needs."""
FLAT_AFTER: Final = 20
"""Steps after which a reward that has not moved is said to be flat."""
SMALL: Final = 0.15
"""The part of the reward that a whole run has moved it by less than when it is flat."""


def is_now(course: Course, step: int) -> bool:
    """Whether a step is among the last ones: what was and has passed is no finding of today."""
    return step > len(course.steps) - WINDOW


def last_steps(course: Course, count: int = WINDOW) -> tuple[int, ...]:
    """The last steps there are, at most `count`."""
    return tuple(range(max(0, len(course.steps) - count) + 1, len(course.steps) + 1))


def known_of(course: Course, *names: str) -> list[tuple[int, float]]:
    """The steps that have a metric, with its value under the first of its names that is there."""
    found = []
    for step, metrics in enumerate(course.steps, 1):
        value = next((metrics[name] for name in names if name in metrics), math.nan)
        if math.isfinite(value):
            found.append((step, value))
    return found


def values_of(course: Course, *names: str) -> list[float]:
    """A metric in each step that has it, under the first of its names that is there."""
    return [value for _, value in known_of(course, *names)]


def change_of(values: Sequence[float]) -> tuple[float, float, float] | None:
    """Means of the first and of the last window, and by how many standard errors they differ; None for too few steps."""
    if len(values) < LEAST:
        return None
    early, late = mean_of(values[:WINDOW]), mean_of(values[-WINDOW:])
    error = noise_of(values) * math.sqrt(2 / WINDOW)
    difference = abs(late - early)
    return early, late, math.inf if not error and difference else difference / error if error else 0.0


def noise_of(values: Sequence[float]) -> float:
    """The standard deviation of a step about its trend, from the differences between neighbours."""
    return float(np.std(np.diff(values)) / math.sqrt(2)) if len(values) > 2 else 0.0


def mean_around(known: Sequence[tuple[int, float]], step: int) -> float:
    """The mean about a step, of values with their steps."""
    before = sum(place <= step for place, _ in known)
    first = min(max(0, before - WINDOW // 2), max(0, len(known) - WINDOW))
    return mean_of([value for _, value in known[first : first + WINDOW]])


def mean_of(values: Sequence[float]) -> float:
    """Their mean; NaN for none, which no comparison finds anything in."""
    return float(np.mean(values)) if len(values) else math.nan


def failed_share(metrics: Mapping[str, float]) -> float | None:
    """The share of a step's rollouts that failed; None where it had none."""
    rollouts = metrics.get("rollouts")
    return metrics.get("failed", 0.0) / rollouts if rollouts else None


def policy_fault_share(metrics: Mapping[str, float]) -> float | None:
    """The share of a step's rollouts that failed by the policy's own fault; None where it had none."""
    failed = sum(value for name, value in metrics.items() if name.startswith(POLICY_FAULT))
    rollouts = metrics.get("rollouts")
    return failed / rollouts if rollouts else None


def policy_fault_causes(course: Course) -> str:
    """What the policy failed by in the last steps, the commonest first."""
    counts: Counter[str] = Counter()
    for metrics in course.steps[-WINDOW:]:
        counts.update({name: round(value) for name, value in metrics.items() if name.startswith(POLICY_FAULT)})
    return ", ".join(f"{name.removeprefix(POLICY_FAULT)} {count}" for name, count in counts.most_common())


def lengths_of(course: Course) -> list[float]:
    """Trained tokens for each rollout that was trained; steps that trained none are left out."""
    return [
        metrics["tokens"] / metrics["rollouts_trained"]
        for metrics in course.steps
        if metrics.get("tokens") and metrics.get("rollouts_trained")
    ]


def is_solved(course: Course) -> bool:
    """Whether there is little left to earn: rollouts hardly differ, and the reward is near the best that was seen."""
    rewards = known_of(course, "reward_with_failures", "reward")
    deviations = dict(known_of(course, "reward_std"))
    pairs = [(reward, deviations[step]) for step, reward in rewards if step in deviations]
    if len(pairs) < WINDOW:
        return False
    most = max(reward + deviation for reward, deviation in pairs)
    least = min(reward - deviation for reward, deviation in pairs)
    now = mean_of([reward for _, reward in rewards[-WINDOW:]])
    return now >= most - 0.2 * (most - least) if most > least else now > 0
