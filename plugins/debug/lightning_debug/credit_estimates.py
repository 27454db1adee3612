"""Estimate the advantages of decisions from executed continuations, and how well credit agrees with them.

The invariant: an executed advantage is an unbiased difference of means over independent continuations, none of which is the
recorded rollout. The unit of statistics over decisions is the task, since decisions of one task are not independent. The same
returns give the same figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import Final, TypeAlias

import numpy as np
from lightning.trainer.gains import LEVEL, student
from numpy.typing import NDArray

from lightning_debug.statistics import Estimate, Floats, interval

Places: TypeAlias = NDArray[np.intp]
"""The indices of some decisions."""
DRAWS: Final = 1_000
"""Bootstrap samples of tasks."""
FALSE_SHARE: Final = 1.0 - LEVEL
"""Most decisions, as a share of those that are said to have mattered, that in expectation did not."""
NODES: Final = 4_000
"""Points of the integral over the tail of Student's distribution."""
NORMAL: Final = 1_000
"""Degrees of freedom from which on Student's distribution is taken for the normal one."""


@dataclass(frozen=True, slots=True)
class Executed:
    """The advantage of an answer as it was executed: `worth` Q(s, a) minus `value` V(s). `interval` is that of the advantage at
    `LEVEL`, `p_value` that of the test that it is 0; both are None if they are not known. `noise` is the variance of the
    advantage's estimate."""

    value: float
    worth: float
    interval: tuple[float, float] | None
    p_value: float | None
    noise: float

    @property
    def advantage(self) -> float:
        """The difference of the two means."""
        return self.worth - self.value


def executed(state: Sequence[float], answer: Sequence[float] | float, bounds: tuple[float, float]) -> Executed:
    """Estimate an advantage from the returns of continuations from the `state` and of others after the recorded `answer`. A
    number in place of these says what the answer is worth: the return of a rollout that it ended.

    `bounds` are the lowest and the highest return that can be. Each sample of returns is extended by the least and the greatest
    of all returns here, one each (Agresti and Caffo 2000, for two shares), or two each if there is one sample (Agresti and
    Coull 1998); the interval is Welch's over these. If all returns here are equal, they are extended by the bounds, so that the
    interval has a width. Of rewards of 0 and 1 it covers 94 % at worst, over all pairs of shares, and more than 95 % in the
    mean; a rare reward that no continuation got is not in it. It is not known for fewer than two continuations, and for bounds
    that leave no room.
    """
    samples = [list(state)] if isinstance(answer, float) else [list(state), list(answer)]
    value = fmean(state)
    worth = answer if isinstance(answer, float) else fmean(answer)
    if min(map(len, samples)) < 2 or not bounds[0] < bounds[1]:
        return Executed(value, worth, None, None, 0.0)
    noise = math.fsum(variance(sample) / len(sample) for sample in samples)
    seen = [*state, *([answer] if isinstance(answer, float) else answer)]
    ends = (min(seen), max(seen)) if min(seen) < max(seen) else bounds
    extended = [[*sample, *(ends * (3 - len(samples)))] for sample in samples]
    parts = [variance(sample) / len(sample) for sample in extended]
    error = math.sqrt(math.fsum(parts))
    freedom = math.fsum(parts) ** 2 / math.fsum(
        part**2 / (len(sample) - 1) for part, sample in zip(parts, extended, strict=True)
    )
    middle = (answer if isinstance(answer, float) else fmean(extended[1])) - fmean(extended[0])
    half, room = student(0.5 + LEVEL / 2, max(3, int(freedom))) * error, bounds[1] - bounds[0]
    found = max(-room, middle - half), min(room, middle + half)
    return Executed(value, worth, found, two_sided(middle / error, freedom), noise)


def two_sided(statistic: float, freedom: float) -> float:
    """Return the probability that a number of Student's distribution is at least as far from 0 as the statistic. With
    x = sqrt(freedom) tan(a) the density is proportional to cos(a) ** (freedom - 1)."""
    if freedom >= NORMAL:
        return math.erfc(abs(statistic) / math.sqrt(2.0))
    whole = np.linspace(0.0, math.pi / 2, NODES)
    tail = np.linspace(math.atan(abs(statistic) / math.sqrt(freedom)), math.pi / 2, NODES)

    def integral(angles: Floats) -> float:
        return float(np.trapezoid(np.cos(angles).clip(0.0) ** (freedom - 1.0), angles))

    return min(1.0, integral(tail) / integral(whole))


def that_mattered(p_values: Sequence[float | None], false_share: float = FALSE_SHARE) -> list[bool]:
    """Return which of many decisions mattered: those whose advantage is not 0, by the procedure of Benjamini and Hochberg
    (1995), which keeps the expected share of false ones below `false_share`. Unknown p-values are left out of the count."""
    known = sorted(value for value in p_values if value is not None)
    passed = [value for rank, value in enumerate(known, 1) if value <= false_share * rank / len(known)]
    limit = max(passed, default=-1.0)
    return [value is not None and value <= limit for value in p_values]


def share_that_mattered(mattered: Sequence[bool], tasks: Sequence[str]) -> Estimate | None:
    """Return the mean over tasks of the share of each task's decisions that mattered; None without a decision. The interval is
    unknown for one task."""
    if not mattered:
        return None
    by_task = [np.array(mattered)[places].mean() for places in _places(tasks).values()]
    shares = np.array(by_task, dtype=np.float64)
    return Estimate(float(shares.mean()), interval(shares) if len(shares) > 1 else None, len(shares))


@dataclass(frozen=True, slots=True)
class Measured:
    """A figure with its interval at `LEVEL`, each None if it is not known."""

    value: float | None = None
    interval: tuple[float, float] | None = None

    @property
    def order(self) -> float:
        """A key to sort figures by: the largest first, unknown ones last."""
        return math.inf if self.value is None else -self.value


@dataclass(frozen=True, slots=True)
class Agreement:
    """How well a credit's advantages agree with the executed ones over `calls` decisions: Pearson's `correlation`, Spearman's
    `rank` correlation, the share `sign` of decisions that mattered to which both give the same sign, and the rank correlation
    `size` of the two sizes: whether credit is large where decisions mattered. `inner` is the correlation without the rollouts'
    last calls, `better` the correlation less that of the run's own credit."""

    calls: int
    correlation: Measured
    rank: Measured
    sign: Measured
    size: Measured
    inner: Measured
    better: Measured


def agreement(
    given: Sequence[float],
    advantages: Sequence[float],
    *,
    mattered: Sequence[bool],
    last: Sequence[bool],
    tasks: Sequence[str],
    own: Sequence[float] = (),
    seed: int = 0,
) -> Agreement:
    """Compare a credit's advantages with the executed ones. `own` are those of the run's credit, none if it is not known.
    Intervals are percentiles of a bootstrap over `tasks` (the task of each decision); they are unknown for fewer than three
    tasks, because all samples that have both of two tasks are alike."""
    credit, true = np.array(given, dtype=np.float64), np.array(advantages, dtype=np.float64)
    judged, inner = np.array(mattered, dtype=bool), ~np.array(last, dtype=bool)
    by_task = list(_places(tasks).values())

    def same_sign(chosen: Floats, other: Floats) -> float | None:
        return float(np.mean(np.sign(chosen) == np.sign(other))) if len(chosen) else None

    def measured(of: Callable[[Floats, Floats], float | None], kept: NDArray[np.bool_]) -> Measured:
        def figure(places: Places) -> float | None:
            chosen = places[kept[places]]
            return of(credit[chosen], true[chosen])

        return Measured(figure(np.arange(len(true))), _bootstrap(figure, by_task, seed))

    def better(places: Places) -> float | None:
        mine, theirs = pearson(credit[places], true[places]), pearson(np.array(own)[places], true[places])
        return None if mine is None or theirs is None else mine - theirs

    everything = np.ones(len(true), dtype=bool)
    beside = Measured(better(np.arange(len(true))), _bootstrap(better, by_task, seed)) if len(own) else Measured()
    return Agreement(
        len(true),
        measured(pearson, everything),
        measured(spearman, everything),
        measured(same_sign, judged),
        measured(lambda one, other: spearman(np.abs(one), np.abs(other)), everything),
        measured(pearson, inner),
        beside,
    )


def ceiling(found: Sequence[Executed]) -> float | None:
    """Return the correlation that the true advantages are expected to have with the executed ones, which are noisy: the root of
    the share of their variance that is no noise. None for fewer than two decisions, and if they do not differ."""
    if len(found) < 2:
        return None
    spread = variance([each.advantage for each in found])
    return None if spread == 0.0 else math.sqrt(max(0.0, 1.0 - fmean(each.noise for each in found) / spread))


def pearson(one: Floats, other: Floats) -> float | None:
    """Return Pearson's correlation; None for fewer than two pairs, and where one side is constant."""
    if len(one) < 2:
        return None
    one, other = one - one.mean(), other - other.mean()
    lengths = float(one @ one) * float(other @ other)
    return float(one @ other) / math.sqrt(lengths) if lengths > 1e-24 else None


def spearman(one: Floats, other: Floats) -> float | None:
    """Return Spearman's rank correlation; equal values have their mean rank."""
    return pearson(_ranks(one), _ranks(other))


def _ranks(values: Floats) -> Floats:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    found: Floats = (ends - (counts - 1) / 2.0)[inverse]
    return found


def _places(tasks: Sequence[str]) -> Mapping[str, Places]:
    names = np.array(tasks)
    return {name: np.flatnonzero(names == name) for name in dict.fromkeys(tasks)}


def _bootstrap(
    figure: Callable[[Places], float | None],
    by_task: Sequence[Places],
    seed: int,
) -> tuple[float, float] | None:
    """Return the percentiles of a figure over samples of tasks. None for fewer than three tasks, and if the figure is
    known in fewer than half of the samples."""
    if len(by_task) < 3:
        return None
    drawn = np.random.default_rng(seed).integers(len(by_task), size=(DRAWS, len(by_task)))
    found = [figure(np.concatenate([by_task[place] for place in places])) for places in drawn]
    known = [value for value in found if value is not None]
    if 2 * len(known) < DRAWS:
        return None
    low, high = np.quantile(known, [0.5 - LEVEL / 2, 0.5 + LEVEL / 2])
    return float(low), float(high)
