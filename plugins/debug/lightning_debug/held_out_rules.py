"""What held-out evaluations say beside the reward of the training tasks: rules over the course of a run.

The invariant: that of `lightning_debug.course_rules`, which asks them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from lightning.trainer.summary import Evaluation

from lightning_debug.diagnosis import Course, Diagnosis, Evidence
from lightning_debug.trends import (
    FLAT_AFTER,
    LEAST,
    SMALL,
    WINDOW,
    change_of,
    known_of,
    mean_around,
    mean_of,
    values_of,
)

LEAST_ROLLOUTS: Final = 12
"""Rollouts of an evaluation that say how far rewards spread, where they are all equal, too."""
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
    results = course.measured
    if len(results) < 4:
        return
    pairs = [(mean_of([one.score, other.score]), one, other) for one, other in pairwise(results)]
    top, one, other = max(pairs[:-2], key=lambda pair: pair[0])
    now_earned, _, last = pairs[-1]
    if top - now_earned < SURE_PAIRS * max(one.error, other.error, last.error):
        return
    best = max(one, other, key=lambda result: result.score)
    train = known_of(course, "reward_with_failures", "reward")
    then, now = mean_around(train, best.step), mean_of([reward for _, reward in train[-WINDOW:]])
    if course.order == "shuffled" and now < then - 0.02 * max(abs(then), 1.0):
        return  # both fall: that is a collapse
    yield Diagnosis(
        "held-out falls",
        f"held-out tasks earned {best.score:.3f} after {best.step} steps and {last.score:.3f} "
        f"after {last.step}"
        + (f", while the training tasks went from {then:.3f} to {now:.3f}" if train else "")
        + ": the policy learns its tasks by heart, or what the reward of them pays. Give more tasks, end earlier "
        "(trainer.patience) and keep the best (trainer.keep = 'best')",
        serious=True,
        steps=tuple(result.step for result in (best, last)),
    )


def held_out_flat(course: Course) -> tuple[Evaluation, Evaluation] | None:
    """The first and the last evaluation of a run whose held-out reward has not moved; None where it has, or where too little
    was done or measured to say so, or where the training reward has surely risen, of which `held_out_stays` speaks."""
    results = course.measured
    if len(results) < 2 or results[-1].step - results[0].step < FLAT_AFTER:
        return None
    first, last = results[0], results[-1]
    scale = max(abs(first.score), first.deviation)
    # Had the reward risen by all of `scale`, it would seem to have moved by less than `SMALL` of that in one case of forty.
    told = 2 * math.hypot(first.error, last.error) <= (1 - SMALL) * scale
    if not told or min(first.rollouts, last.rollouts) < LEAST_ROLLOUTS:
        return None
    if any(
        abs(result.score - first.score) > SURE_TWO * math.hypot(result.error, first.error) for result in results[1:]
    ):
        return None
    now = mean_of([result.score for result in results[1:][-2:]])
    if abs(now - first.score) > SMALL * scale:
        return None
    change = change_of(values_of(course, "reward_with_failures", "reward"))
    risen = change is not None and change[1] > change[0] and change[2] >= SURE_TWO and course.order == "shuffled"
    return None if risen else (first, last)


def held_out_stays(evidence: Evidence) -> Iterator[Diagnosis]:
    """The reward of the training tasks has risen, and the held-out one has not followed."""
    course = evidence.course
    results = course.measured
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
