"""How a number of a run's steps changes: means of windows, and how sure a difference is.

The noise of a step is taken from what neighbouring steps differ by, so that a trend is no noise.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from lightning.trainer.diagnosis import Course
from lightning.trainer.summary import POLICY_FAULT

WINDOW: Final = 5
"""Steps of which a mean is taken."""
LEAST: Final = 2 * WINDOW
"""Steps that a comparison needs."""


def is_now(course: Course, step: int) -> bool:
    """Whether a step is among the last ones: what was and has passed is no finding of today."""
    return step >= len(course.steps) - WINDOW


def last_steps(course: Course, count: int = WINDOW) -> tuple[int, ...]:
    """The last steps there are, at most `count`."""
    return tuple(range(max(0, len(course.steps) - count), len(course.steps)))


def values_of(course: Course, *names: str) -> list[float]:
    """A metric in each step that has it, under the first of its names that is there."""
    found = []
    for metrics in course.steps:
        value = next((metrics[name] for name in names if name in metrics), math.nan)
        if math.isfinite(value):
            found.append(value)
    return found


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


def mean_around(values: Sequence[float], step: int) -> float:
    """The mean about a step."""
    first = min(max(0, step - WINDOW // 2), max(0, len(values) - WINDOW))
    return mean_of(values[first : first + WINDOW])


def mean_of(values: Sequence[float]) -> float:
    """Their mean; 0 for none."""
    return float(np.mean(values)) if len(values) else 0.0


def failed_share(metrics: Mapping[str, float]) -> float:
    """The share of a step's rollouts that failed."""
    return metrics.get("failed", 0.0) / max(metrics.get("rollouts", 0.0), 1.0)


def policy_fault_share(metrics: Mapping[str, float]) -> float:
    """The share of a step's rollouts that failed by the policy's own fault."""
    failed = sum(value for name, value in metrics.items() if name.startswith(POLICY_FAULT))
    return failed / max(metrics.get("rollouts", 0.0), 1.0)


def policy_fault_causes(course: Course) -> str:
    """What the policy failed by in the last steps, the commonest first."""
    counts: Counter[str] = Counter()
    for metrics in course.steps[-WINDOW:]:
        counts.update({name: round(value) for name, value in metrics.items() if name.startswith(POLICY_FAULT)})
    return ", ".join(f"{name.removeprefix(POLICY_FAULT)} {count}" for name, count in counts.most_common())


def lengths_of(course: Course) -> list[float]:
    """Trained tokens for each rollout of the groups that were used; steps that used none are left out."""
    return [
        metrics["tokens"] / (metrics["rollouts"] * metrics["groups_used"] / metrics["groups"])
        for metrics in course.steps
        if all(metrics.get(name) for name in ("tokens", "rollouts", "groups", "groups_used"))
    ]


def is_solved(course: Course) -> bool:
    """Whether there is little left to earn: rollouts hardly differ, and the reward is near the best that was seen."""
    rewards, deviations = values_of(course, "reward_with_failures", "reward"), values_of(course, "reward_std")
    if len(rewards) < WINDOW or len(deviations) != len(rewards):
        return False
    most = max(reward + deviation for reward, deviation in zip(rewards, deviations, strict=True))
    least = min(reward - deviation for reward, deviation in zip(rewards, deviations, strict=True))
    now = mean_of(rewards[-WINDOW:])
    return now >= most - 0.2 * (most - least) if most > least else now > 0
