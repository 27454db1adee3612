"""Discrete events, and work whose speed depends on who else works.

The invariant: work is conserved. A job of so many units on a clock ends when the clock has run exactly as far, however often
its rate changed meanwhile; so a change of rate costs nothing for the jobs that it concerns.

Jobs that share something at the same speed (sequences in one batch, threads on the same cores) share one `Clock`: it runs in
units of work for each of them, and they end in the order of where they end on it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable

Action = Callable[[], None]


class Clock:
    """Units of work done so far by each job on it. `rate` is in units per second and may be changed at any moment."""

    __slots__ = ("_jobs", "_numbers", "done", "rate")

    def __init__(self, rate: float = 0.0) -> None:
        self.done, self.rate = 0.0, rate
        self._jobs: list[tuple[float, int, Action]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._jobs)

    def begin(self, units: float, action: Action) -> None:
        """Call `action` when so many units are done from now on."""
        heapq.heappush(self._jobs, (self.done + units, next(self._numbers), action))

    def seconds(self) -> float:
        """Until the next job ends at the present rate; infinite when none will."""
        if not self._jobs or self.rate <= 0.0:
            return math.inf
        return max(0.0, (self._jobs[0][0] - self.done) / self.rate)

    def run(self, seconds: float) -> None:
        """Let time go by."""
        self.done += seconds * self.rate

    def end(self) -> Action:
        """Take the next job from the clock, which is where it ends now; returns what is to be called."""
        units, _, action = heapq.heappop(self._jobs)
        self.done = units
        return action


class Kernel:
    """Time, in seconds, and everything that happens in it. No randomness: the same jobs give the same times."""

    def __init__(self) -> None:
        self.now = 0.0
        self._waits = Clock(1.0)
        self._clocks = [self._waits]
        self.before: Callable[[float], None] = lambda seconds: None
        """Called with the seconds that are about to go by, while everything is as it was in them."""

    def clock(self) -> Clock:
        """A new clock, which stands still until it has a rate."""
        clock = Clock()
        self._clocks.append(clock)
        return clock

    def after(self, seconds: float, action: Action) -> None:
        """Call `action` when so many seconds have gone by."""
        self._waits.begin(seconds, action)

    def step(self) -> bool:
        """Go to the next event and let it happen; False when none is left."""
        seconds, chosen = math.inf, self._waits
        for clock in self._clocks:
            left = clock.seconds()
            if left < seconds:
                seconds, chosen = left, clock
        if seconds == math.inf:
            return False
        if seconds > 0.0:
            self.before(seconds)
            self.now += seconds
            for clock in self._clocks:
                clock.run(seconds)
        chosen.end()()
        return True
