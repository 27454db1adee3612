"""Bandits that find the best of several prompts with few rollouts.

The invariant: a selection never asks for more rollouts than its budget. With the same rewards it makes the same choices, and of
equal prompts the first one wins.

The methods are those of ProTeGi (arXiv 2305.03495, section 3.2): UCB (its algorithm 3) and successive rejects (its algorithm 4,
after Audibert and Bubeck 2010). Unlike there, several arms are drawn at once, on the same tasks, so that rollouts run in
parallel, and UCB's bonus is scaled by the range of the rewards seen, which need not lie between 0 and 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

Method = Literal["ucb", "successive_rejects"]


@dataclass
class Scores:
    """The rewards of each prompt, by version, and the number of rollouts in which the agent failed with it.

    A failure has no reward. In a comparison it counts as the worst reward of any prompt so far, so that a prompt that makes the
    agent fail on hard tasks does not win by the easy ones.
    """

    rewards: dict[int, list[float]] = field(default_factory=dict)
    failures: dict[int, int] = field(default_factory=dict)

    def add(self, version: int, rewards: Sequence[float], failures: int) -> None:
        """Add the results of some rollouts of a prompt."""
        self.rewards.setdefault(version, []).extend(rewards)
        self.failures[version] = self.failures.get(version, 0) + failures

    def count(self, version: int) -> int:
        """The number of rollouts that count for a prompt, failures included."""
        return len(self.rewards.get(version, ())) + self.failures.get(version, 0)

    def range(self) -> tuple[float, float]:
        """The worst and the best reward seen; (0, 0) before any."""
        seen = [reward for rewards in self.rewards.values() for reward in rewards]
        return (min(seen), max(seen)) if seen else (0.0, 0.0)

    def value(self, version: int) -> float | None:
        """The mean reward of a prompt, failures as the worst reward; None without a rollout."""
        count = self.count(version)
        if not count:
            return None
        worst, _ = self.range()
        return (math.fsum(self.rewards.get(version, ())) + worst * self.failures.get(version, 0)) / count

    def ranked(self, versions: Sequence[int]) -> list[int]:
        """Sort prompts by value, the best first; equal ones keep their order, those without a rollout come last."""
        values = {version: self.value(version) for version in versions}
        return sorted(versions, key=lambda version: (values[version] is None, -(values[version] or 0.0)))


@dataclass(frozen=True, slots=True)
class Draw:
    """A request to run each of these prompts on the same tasks, `tasks` in number."""

    versions: tuple[int, ...]
    tasks: int


@dataclass
class Selection:
    """The selection of `keep` prompts out of `versions` with at most `budget` rollouts.

    Take a draw from `draws`, run it, add its results to `scores`, and take the next; at the end `best` returns the prompts.
    """

    method: Method
    scores: Scores
    versions: Sequence[int]
    keep: int
    budget: int
    minibatch: int
    exploration: float

    def __post_init__(self) -> None:
        self._left = list(self.versions)

    def draws(self) -> Iterator[Draw]:
        """Yield the draws, one after the other; none if there are no more than `keep` prompts."""
        if len(self.versions) > self.keep:
            yield from self._ucb() if self.method == "ucb" else self._successive_rejects()

    def best(self) -> list[int]:
        """The selected prompts, best first."""
        return self.scores.ranked(self._left)[: self.keep]

    def _ucb(self) -> Iterator[Draw]:
        """Yield draws by UCB: each time the `keep` prompts with the highest mean + exploration * range * sqrt(ln t / n), where
        n counts a prompt's rollouts and t all rollouts. Prompts that never ran go first."""
        minibatch = max(1, min(self.minibatch, self.budget // len(self.versions)))
        left = self.budget
        while left >= minibatch:
            count = min(self.keep, left // minibatch)
            yield Draw(tuple(sorted(self.versions, key=self._bounds().__getitem__, reverse=True)[:count]), minibatch)
            left -= count * minibatch

    def _bounds(self) -> dict[int, float]:
        worst, best = self.scores.range()
        counts = {version: self.scores.count(version) for version in self.versions}
        log_total = math.log(max(sum(counts.values()), 1))
        bounds = {}
        for version, count in counts.items():
            value = self.scores.value(version)
            bonus = self.exploration * (best - worst) * math.sqrt(log_total / count) if count else 0.0
            bounds[version] = math.inf if value is None else value + bonus
        return bounds

    def _successive_rejects(self) -> Iterator[Draw]:
        """Yield draws by successive rejects of K prompts: in phase k = 1 ... K - `keep`, every prompt that is left gets up to
        n_k rollouts of this selection in total, n_k = ceil((budget - K) / (L (K + 1 - k))) with L = 1/2 + sum of 1/i over
        i = 2 ... K. Then the worst is dropped."""
        total, remaining, done = len(self._left), self.budget, 0
        log_bar = 0.5 + sum(1 / i for i in range(2, total + 1))
        for phase in range(1, total - self.keep + 1):
            goal = math.ceil((self.budget - total) / (log_bar * (total + 1 - phase)))
            tasks = min(goal - done, remaining // len(self._left))
            if tasks > 0:
                yield Draw(tuple(self._left), tasks)
                remaining -= tasks * len(self._left)
                done += tasks
            self._left = self.scores.ranked(self._left)[:-1]
