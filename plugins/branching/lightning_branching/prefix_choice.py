"""Choose behind which earlier rollout, and at which of its calls, a group begins, so that nearly half of its rollouts succeed.

The invariant: the choice is a pure function of the groups that were added and of their order. So a resumed run chooses what the
run chose before.

Binary rewards teach most where half of a group succeeds (Rollout Pass-Rate Control, arXiv 2605.05112). A task of which fewer
than a quarter of the rollouts succeed gets the prefix of a good rollout as a head start; one of which more than three quarters
succeed, the prefix of a bad rollout as a handicap. Moving the beginning away from the end as success rises is a reverse
curriculum (R3, arXiv 2402.05808).

A rollout's *reward* is here its return: what the agent returned and all step rewards. What it is *worth*: 0 for the smallest
reward that a rollout of its task has earned so far without a failure, 1 for the largest. With rewards of 0 and 1 the mean worth
of a group is the share that succeeded. A failure is worth at least 0, however much `trainer.policy_fault` takes off, so
that one does not make all others look good; only where all others earned the same do failures set the lower end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, cycle, islice
from statistics import fmean
from typing import Final, NamedTuple

import numpy as np
from lightning.credit import all_equal
from lightning.types import Rollout

HALF: Final = 0.5
SKEWED: Final = 0.25
"""A task whose mean worth is this near 0 or 1 gets prefixes; other tasks teach from their beginning."""
NEARER: Final = 0.05
"""By how much nearer to one half the worth of a group behind a prefix must be expected than that of the task. With less, the
prefix teaches no more than the task."""
RAREST: Final = 0.01
"""The mean worth that a task is expected to have where no rollout of it has earned anything."""
REMEMBERED: Final = 16
"""Most groups of a task that are looked back at."""
FORGETTING: Final = 0.5
"""How much less each older group of a task counts in its mean worth."""
KNOTS: Final = 8
"""Number of parts into which the way of a rollout is divided to count what groups behind its prefixes were worth."""
WINDOW: Final = 16
"""Number of steps whose groups are counted so."""
FADING: Final = 0.8
"""How much less the groups of each older of these steps count."""
LENT: Final = 4
"""Most rollouts of a task that another run lends at either end of its rewards."""
BELIEF: Final = 1.0
"""How many groups the expectation without any group counts for."""


class Begun(NamedTuple):
    """A rollout that began at its task. `able` is false for one that failed, behind which nothing can begin."""

    rollout: str
    attempt: int
    reward: float
    able: bool = True


class Place(NamedTuple):
    """A call at which a rollout can be branched. `left` is the share of the rollout that lies behind it: near 1 for an early
    call, near 0 for a late one."""

    seq: int
    left: float


class Parent(NamedTuple):
    """A rollout behind whose prefixes groups may begin: its places, early ones first, and its reward."""

    rollout: Rollout
    places: tuple[Place, ...]
    reward: float


class Beginning(NamedTuple):
    """Where a group begins: at the call `seq` of a parent."""

    parent: Rollout
    seq: int


@dataclass(slots=True)
class _Known:
    """What is known of a task. `groups` are its latest ones that began at the task; `borrowed` are another run's rollouts, some
    of the worst and of the best. `low` and `high` are the ends of the rewards without a failure, `failed` is the lowest of
    failures."""

    groups: deque[tuple[Begun, ...]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    borrowed: tuple[Begun, ...] = ()
    low: float = np.inf
    high: float = -np.inf
    failed: float = np.inf
    step: int = 0
    prefixes: int = 0

    def spread(self, group: Sequence[Begun]) -> None:
        """Widen the range of rewards that the task has earned."""
        rewards = [one.reward for one in group if one.able]
        self.low, self.high = min([self.low, *rewards]), max([self.high, *rewards])
        self.failed = min([self.failed, *(one.reward for one in group if not one.able)])

    @property
    def least(self) -> float:
        """The reward that is worth 0."""
        return self.low if self.low < self.high else min(self.low, self.failed)

    def worth(self, reward: float) -> float:
        """Return what a reward is worth, from 0 to 1. The task must have earned two different ones."""
        return min(1.0, max(0.0, (reward - self.least) / (self.high - self.least)))

    def mean(self, group: Sequence[Begun]) -> float:
        """Return the mean worth of rollouts, one at least."""
        return fmean(self.worth(one.reward) for one in group)

    @property
    def rate(self) -> float | None:
        """The mean worth of the rollouts that began at the task, later groups counting more; None where it is unknown."""
        if not self.least < self.high or not self.groups:
            return None
        means = [self.mean(group) for group in self.groups]
        return float(np.average(means, weights=FORGETTING ** np.arange(len(means), dtype=np.float64)[::-1]))


def ends(rollouts: Sequence[Begun]) -> list[Begun]:
    """Return the worst and the best of some rollouts, `LENT` at most of each."""
    ordered = sorted(rollouts, key=lambda one: one.reward)
    return ordered if len(ordered) <= 2 * LENT else [*ordered[:LENT], *ordered[-LENT:]]


class Chooser:
    """Knows how the groups of a run went, and chooses where further ones begin. Add groups in the order of their steps."""

    def __init__(self) -> None:
        self._tasks: dict[str, _Known] = {}
        self._shares: deque[tuple[int, float, float]] = deque(maxlen=4096)
        self._barren: deque[tuple[int, bool]] = deque(maxlen=4096)
        self._void: set[str] = set()
        self._repeatable: set[str] = set()
        self.voided = 0
        """Behind how many rollouts in a row, of the latest, groups were void as a whole."""

    def lend(self, task: str, rollouts: Sequence[Begun]) -> None:
        """Add the rollouts that another run made of a task (`ends`)."""
        known = self._tasks.setdefault(task, _Known())
        known.borrowed = tuple(rollouts)
        known.spread(known.borrowed)

    def add(self, task: str, step: int, group: Sequence[Begun]) -> None:
        """Add a group of a step that began at its task; `group` are its rollouts with a reward."""
        if group:
            known = self._tasks.setdefault(task, _Known())
            known.groups.append(tuple(group))
            known.step = step
            known.spread(group)
            self._barren.append((step, all_equal(np.array([one.reward for one in group]))))

    def add_behind(self, task: str, step: int, parent: Parent | None, seq: int, group: Sequence[Begun]) -> None:
        """Add a group of a step that began behind a prefix: the parent (None if it cannot be read any more), the call, and the
        group's rollouts with a reward, none if it was void as a whole (`add_void`)."""
        known = self._tasks.setdefault(task, _Known())
        known.prefixes += 1
        if not group:
            return
        self.voided, before = 0, known.rate
        if parent is not None:
            self._repeatable.add(parent.rollout.id)
        place = next((one for one in parent.places if one.seq == seq), None) if parent else None
        if place and parent and before is not None:
            end = known.worth(parent.reward)
            if abs(end - before) > SKEWED:
                share = (known.mean(group) - before) / (end - before)
                self._shares.append((step, place.left, float(np.clip(share, 0.0, 1.0))))
        known.spread(group)

    def add_void(self, parent: str) -> None:
        """Add a group that was void as a whole: no further group begins behind that rollout."""
        self.voided += parent not in self._void
        self._void.add(parent)

    def skewed(self) -> list[str]:
        """Return the tasks that get prefixes: first those that had the fewest, of these the ones that were sampled last."""
        rates = ((name, known.rate) for name, known in self._tasks.items())
        found = [name for name, rate in rates if rate is not None and abs(rate - HALF) > HALF - SKEWED]
        return sorted(found, key=lambda name: (self._tasks[name].prefixes, -self._tasks[name].step, name))

    def parents(self, task: str) -> Iterator[Begun]:
        """Yield the rollouts behind which a skewed task may begin, those furthest from its mean worth first, later ones before
        earlier ones."""
        known = self._tasks[task]
        rate = known.rate
        assert rate is not None, "asked of skewed tasks"
        every = [one for group in reversed(known.groups) for one in group] + list(known.borrowed)
        sign = 1.0 if rate < HALF else -1.0
        far = [one for one in every if one.able and sign * (known.worth(one.reward) - HALF) > 0]
        yield from (one for one in sorted(far, key=lambda one: -sign * one.reward) if one.rollout not in self._void)

    def choose(self, task: str, parent: Parent, step: int) -> Beginning | None:
        """Return the call of a parent behind which the share of a group that is expected to succeed is nearest to one half;
        None if behind no call it is nearer than at the task (`NEARER`)."""
        known = self._tasks[task]
        rate = known.rate
        if rate is None or not parent.places:
            return None
        end = known.worth(parent.reward)
        share = self._share(step, rate, start=end > rate)
        expected = [rate + (end - rate) * float(np.interp(place.left, *share)) for place in parent.places]
        found = min(range(len(expected)), key=lambda index: (round(abs(expected[index] - HALF), 9), -index))
        if abs(expected[found] - HALF) > abs(rate - HALF) - NEARER:
            return None
        return Beginning(parent.rollout, parent.places[found].seq)

    def repeated(self, found: Sequence[Beginning], count: int, step: int) -> list[Beginning]:
        """Return where the groups behind prefixes begin, `count` at most: at those of `found`, and again at those behind whose
        parent a group that was not void has begun, in turn, until the share of the latest groups is reached that taught
        nothing at their task. So a group behind the one prefix that is known takes the place of such a group."""
        known = [(FADING ** (step - at), barren) for at, barren in self._barren if step - at <= WINDOW]
        share = sum(weight for weight, barren in known if barren) / max(sum(weight for weight, _ in known), 1e-9)
        again = cycle([one for one in found if one.parent.id in self._repeatable])
        return list(islice(chain(found, again), min(count, max(len(found), round(share * count)))))

    def _share(self, step: int, rate: float, *, start: bool) -> tuple[list[float], list[float]]:
        """Return, at the knots of the way that is left, which share of the difference between the task and the parent a prefix
        keeps: from 1 at the parent's end to 0 at the task. It is a mean over the latest groups of all tasks, with one group
        (`BELIEF`) for which all parts of the way are equally hard. Then success behind a good rollout (`start`: a head start)
        is the task's `rate` to the power of the way that is left, and the mistake of a bad one is anywhere on its way."""
        knots, rate = [knot / KNOTS for knot in range(KNOTS + 1)], max(rate, RAREST)
        kept = [(rate**left - rate) / (1.0 - rate) if start else 1.0 - left for left in knots]
        weights, sums = [BELIEF] * (KNOTS + 1), [BELIEF * share for share in kept]
        for at, left, share in self._shares:
            if step - at <= WINDOW:
                knot = min(max(round(left * KNOTS), 1), KNOTS - 1)
                weights[knot] += FADING ** (step - at)
                sums[knot] += FADING ** (step - at) * share
        return knots, [total / weight for total, weight in zip(sums, weights, strict=True)]
