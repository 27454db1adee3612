"""Statistics of rewards: avg@k and pass@k with intervals, and a sequential test of a difference that may be read at any time.

The invariant: the unit of all statistics is the task, since rollouts of one task are not independent. The same rewards in the
same order give the same figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import NormalDist
from typing import Final, TypeAlias

import numpy as np
from lightning.trainer.gains import LEVEL, student
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
BETS: Final = np.array([0.1, 0.25, 0.5, 0.85])
"""Bets, as shares of the largest possible stake. The best bet is about the mean over the variance, which is not known."""
CANDIDATES: Final = 401
"""Number of grid points on which means are tested. An interval is as fine as this grid, and rounded outwards."""
TOGETHER: Final = 64
"""Most differences that are computed at once."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over `tasks` tasks with its interval at `LEVEL`, which is None if rewards lie outside the bounds."""

    value: float
    interval: tuple[float, float] | None
    tasks: int


def avg_at_k(rewards: Sequence[Sequence[float]], bounds: tuple[float, float] = (0.0, 1.0)) -> Estimate | None:
    """Return the mean over tasks of the mean reward of each task's rollouts; None without any reward. Tasks without a reward
    are left out. The interval is None if a reward lies outside `bounds`."""
    known = [task for task in rewards if task]
    if not known:
        return None
    low, high = bounds
    means = np.array([math.fsum(task) / len(task) for task in known])
    value = math.fsum(means) / len(means)
    if min(map(min, known)) < low or max(map(max, known)) > high:
        return Estimate(value, None, len(known))
    found = interval(np.clip((means - low) / (high - low), 0.0, 1.0))  # rounding may put a mean outside
    return Estimate(value, (low + found[0] * (high - low), low + found[1] * (high - low)), len(known))


def pass_at_k(successes: Sequence[tuple[int, int]], k: int) -> Estimate | None:
    """Return the chance that at least one of k rollouts of a task succeeds, mean over tasks; None if no task has k rollouts.

    `successes` has (number of successes c, number of rollouts n) for each task. The estimate is unbiased (Chen et al. 2021):
    1 - C(n - c, k) / C(n, k). A task with fewer than k rollouts is left out.
    """
    if k < 1:
        raise ValueError(f"pass@k needs k >= 1, not {k}")
    enough = [(right, count) for right, count in successes if count >= k]
    if not enough:
        return None
    values = np.array([1.0 - math.comb(count - right, k) / math.comb(count, k) for right, count in enough])
    return Estimate(float(values.mean()), interval(values), len(enough))


def ks_of(n: int) -> list[int]:
    """Return the values of k for which pass@k is reported with n rollouts: the powers of two up to n, and n."""
    return sorted({1 << power for power in range(n.bit_length())} | {n})


def interval(values: Floats) -> tuple[float, float]:
    """Return the interval at `LEVEL` of the mean of `values`, each from 0 to 1 and one for each task.

    This is Student's interval over the tasks and, as Agresti and Coull do, over additional values at 0 and at 1 (half the
    quantile's square of each). Tasks are the independent draws. The additional values make the interval wide enough for rare
    tasks that are not in the sample, such as the one in twenty that can be solved.
    """
    tasks = len(values)
    if tasks == 1:
        return 0.0, 1.0
    quantile = student(0.5 + LEVEL / 2, tasks - 1)
    more = quantile**2 / 2
    total = tasks + 2 * more
    middle = (math.fsum(values) + more) / total
    squares = math.fsum((values - middle) ** 2) + more * (middle**2 + (1 - middle) ** 2)
    half = quantile * math.sqrt(squares) / total
    return max(0.0, middle - half), min(1.0, middle + half)


def share_interval(share: float, size: float) -> tuple[float, float]:
    """Return the interval at `LEVEL` of a share that was counted over `size` independent draws: Wilson's, which stays between 0
    and 1 and has a width even where the share is 0 or 1."""
    z = NormalDist().inv_cdf(0.5 + LEVEL / 2)
    middle, width = share + z * z / (2 * size), 1 + z * z / size
    half = z * math.sqrt(share * (1 - share) / size + z * z / (4 * size * size))
    return max(0.0, (middle - half) / width), min(1.0, (middle + half) / width)


@dataclass
class SequentialTest:
    """A sequential test of the mean of bounded differences, which is valid whenever it is read and stopped.

    `low` and `high` bound each difference. A gambler bets against each candidate for the mean, in both directions, with several
    fixed shares of the largest stake. If a candidate is the true mean, the capital ever grows twentyfold in at most one of
    twenty sequences (Ville's inequality), however often it is read. The candidates that were not refuted so are the interval
    (Waudby-Smith and Ramdas 2024). The test assumes that each difference has the same mean, whatever came before: give tasks in
    a random order, each once.
    """

    low: float
    high: float
    count: int = field(init=False, default=0)
    """The number of differences added so far."""
    decided: int = field(init=False, default=0)
    """1: the mean is above 0; -1: below 0; 0: not decided. A decision never changes."""
    _candidates: Floats = field(init=False, repr=False)
    _capital: Floats = field(init=False, repr=False)
    _most: Floats = field(init=False, repr=False)
    _sum: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        if not self.low < 0.0 < self.high:
            raise ValueError(f"differences from {self.low} to {self.high} have no zero between")
        grid = np.linspace(self.low, self.high, CANDIDATES)[1:-1]
        self._candidates = np.append(grid, 0.0)  # `decided` tests the mean 0 itself
        self._capital = np.zeros((2, len(BETS), len(self._candidates)))
        self._most = np.full(len(self._candidates), -np.inf)

    @property
    def mean(self) -> float:
        """The mean of the differences so far; 0 without any."""
        return self._sum / self.count if self.count else 0.0

    def add(self, differences: Sequence[float]) -> None:
        """Add differences, in their order. Raises `ValueError` for one outside the bounds."""
        for first in range(0, len(differences), TOGETHER):
            self._add(np.array(differences[first : first + TOGETHER], dtype=np.float64))

    def _add(self, differences: Floats) -> None:
        outside = differences[~((self.low <= differences) & (differences <= self.high))]
        if len(outside):
            raise ValueError(f"a difference of {outside[0]} is outside {self.low} to {self.high}")
        # The largest stake loses all the capital at the bound on that side, and never more.
        gain = differences[:, None] - self._candidates
        odds = np.stack([gain / (self._candidates - self.low), -gain / (self.high - self._candidates)], axis=1)
        logs = np.log1p(BETS[None, None, :, None] * odds[:, :, None, :])
        capital = self._capital + np.cumsum(logs, axis=0)
        self._capital = capital[-1]
        mixed = _log_mean(capital.reshape(len(differences), -1, len(self._candidates)))
        crossed = np.flatnonzero(mixed[:, -1] >= -math.log(1.0 - LEVEL))
        if not self.decided and len(crossed):
            self.decided = 1 if self._sum + float(differences[: crossed[0] + 1].sum()) > 0.0 else -1
        self._most = np.maximum(self._most, mixed.max(axis=0))
        self.count, self._sum = self.count + len(differences), self._sum + float(differences.sum())

    @property
    def interval(self) -> tuple[float, float]:
        """The smallest interval with all means that were never refuted so far; the interval never grows."""
        left = self._candidates[self._most < -math.log(1.0 - LEVEL)]
        step = (self.high - self.low) / (CANDIDATES - 1)
        if not len(left):  # the differences were not in random order, or their mean changed
            return self.mean, self.mean
        low, high = max(self.low, float(left.min()) - step), min(self.high, float(left.max()) + step)
        return (max(low, 0.0), high) if self.decided > 0 else (low, min(high, 0.0)) if self.decided < 0 else (low, high)

    @property
    def p_value(self) -> float:
        """The p-value at any time: if there is no difference, it is ever at most p with a probability of at most p."""
        return min(1.0, math.exp(-float(self._most[-1])))


def _log_mean(logs: Floats) -> Floats:
    """Return log(mean(exp(logs))) over the middle axis, computed without overflow."""
    most = logs.max(axis=1)
    found: Floats = most + np.log(np.exp(logs - most[:, None]).mean(axis=1))
    return found


ORDERS: Final = 20_000
"""Most orders of which a permutation test counts all."""
DRAWN: Final = 4_000
"""Orders that it draws, with a fixed seed, where there are more."""


def p_regrouped(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the p-value of the difference of two means by a permutation test: the share of all ways to deal the values to two
    sets of these sizes whose means differ at least as much. Values must be independent, such as one for each group of rollouts.
    Raises `ValueError` for an empty set."""
    if not one or not other:
        raise ValueError("a permutation test needs values on both sides")
    values, size = np.array([*one, *other], dtype=np.float64), len(one)
    if math.comb(len(values), size) <= ORDERS:
        chosen = np.array(list(combinations(range(len(values)), size)))
    else:
        chosen = np.argsort(np.random.default_rng(0).random((DRAWN, len(values))), axis=1)[:, :size]
        chosen[0] = np.arange(size)  # the deal that was seen counts, so that p is never 0
    sums = values[chosen].sum(axis=1)
    differences = np.abs((values.sum() - sums) / len(other) - sums / size)
    seen = abs(float(np.mean(values[size:]) - np.mean(values[:size])))
    return float(np.mean(differences >= seen - 1e-9))


def p_flipped(differences: Sequence[float]) -> float:
    """Return the p-value of a mean of paired differences by a permutation test: the share of all ways to flip their signs whose
    mean is at least as far from 0. Raises `ValueError` without a difference."""
    if not differences:
        raise ValueError("a permutation test needs a difference")
    values = np.array(differences, dtype=np.float64)
    if 2 ** len(values) <= ORDERS:
        signs = 1.0 - 2.0 * ((np.arange(2 ** len(values))[:, None] >> np.arange(len(values))) & 1)
    else:
        signs = np.random.default_rng(0).choice([-1.0, 1.0], (DRAWN, len(values)))
        signs[0] = 1.0
    return float(np.mean(np.abs(signs @ values) >= abs(values.sum()) - 1e-9))
