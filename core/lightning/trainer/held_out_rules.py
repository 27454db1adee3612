"""What held-out evaluations say beside the reward of the training tasks: rules over the course of a run.

The invariant: that of `lightning.trainer.course_rules`, which asks them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from lightning.trainer.diagnosis import Diagnosis, Evidence
from lightning.trainer.trends import LEAST, WINDOW, mean_around, mean_of, values_of

SURE_PAIRS: Final = 3.5
"""Standard errors of one evaluation by which the mean of two is less than that of the two best."""
SURE_TWO: Final = 2.5
"""Standard errors of one evaluation that the mean of the last two may be above the first, and still be no gain."""
RISEN: Final = 0.3
"""The share by which the training reward has risen that held-out tasks should show something of."""
FOLLOWED: Final = 0.25
"""The part of it that they show at least."""


def held_out_falls(evidence: Evidence) -> Iterator[Diagnosis]:
    """The held-out reward falls while that of the training tasks does not."""
    course = evidence.course
    results = [result for result in course.evaluations if result.rollouts and result.step <= len(course.steps)]
    if len(results) < 4:
        return
    pairs = [(mean_of([one.score, other.score]), one, other) for one, other in pairwise(results)]
    top, one, other = max(pairs[:-2], key=lambda pair: pair[0])
    now_earned, _, last = pairs[-1]
    if top - now_earned < SURE_PAIRS * max(one.error, other.error, last.error):
        return
    best = max(one, other, key=lambda result: result.score)
    train = values_of(course, "reward_with_failures", "reward")
    then, now = mean_around(train, best.step), mean_of(train[-WINDOW:])
    if course.order == "shuffled" and now < then - 0.02 * max(abs(then), 1.0):
        return  # both fall: that is a collapse
    yield Diagnosis(
        "held-out falls",
        f"held-out tasks earned {best.score:.3f} after {best.step} steps and {last.score:.3f} "
        f"after {last.step}, while the training tasks went from {then:.3f} to {now:.3f}: the policy learns its tasks by "
        "heart, or what the reward of them pays. Give more tasks, end earlier (trainer.patience) and keep the best "
        "(trainer.keep = 'best')",
        serious=True,
        steps=tuple(result.step for result in (best, last)),
    )


def held_out_stays(evidence: Evidence) -> Iterator[Diagnosis]:
    """The reward of the training tasks has risen, and the held-out one has not followed."""
    course = evidence.course
    results = [result for result in course.evaluations if result.rollouts and result.step <= len(course.steps)]
    train = values_of(course, "reward_with_failures", "reward")
    if len(results) < 3 or len(train) < LEAST or course.order != "shuffled":
        return
    then, now = mean_of(train[:2]), mean_of(train[-WINDOW:])
    first, last = results[0].score, mean_of([result.score for result in results[-2:]])
    gained, error = now - then, max(result.error for result in (results[0], *results[-2:]))
    if gained <= RISEN * max(abs(now), abs(then)) or last - first + SURE_TWO * error >= FOLLOWED * gained:
        return
    if now - last > gained / 2:  # else the held-out tasks were solved from the beginning
        yield Diagnosis(
            "held-out stays",
            f"the training tasks went from {then:.3f} to {now:.3f}, and held-out tasks from {first:.3f} to {last:.3f}: what is "
            "learned does not carry over to them. Are they of another kind? Give training tasks of their kind, or more of them",
            serious=True,
            steps=(results[0].step, results[-1].step),
        )
