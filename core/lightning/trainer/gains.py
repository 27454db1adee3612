"""How sure a change of the held-out reward is: the gain from one evaluation to another, with its interval.

The invariant: a gain is never said without its interval and its number of tasks. The two evaluations are treated as
independent; if they are of the same tasks, which are alike hard both times, the interval is rather too wide than too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

from lightning.safe_text import counted
from lightning.trainer.summary import Evaluation

LEVEL: Final = 0.95
"""The confidence level of all intervals."""
MAY_BE_CHANCE: Final = "the change may be chance; more held-out tasks tell smaller changes apart"
"""The words for a gain whose interval has 0 in it, or is unknown."""
NOTHING_EARNED: Final = "no rollout earned anything before or after; no interval"
"""The words for a gain from 0 to 0, all rewards of which are 0: these do not show how much others would vary."""
NO_CHANGE: Final = "the held-out reward did not change; more held-out tasks tell smaller changes apart"
"""The words for a gain of exactly 0."""


@dataclass(frozen=True, slots=True)
class Gain:
    """The change of a held-out mean from `before` to `after`, over `tasks` held-out tasks: those that count in the smaller of
    the two evaluations. `interval` is that of the change at `LEVEL`; None if it is not known, because fewer than two tasks
    count, the spread of their values was not recorded, or all values before and after are 0."""

    before: float
    after: float
    interval: tuple[float, float] | None
    tasks: int

    @property
    def change(self) -> float:
        """The mean after minus the mean before."""
        return self.after - self.before

    @property
    def is_certain(self) -> bool:
        """Whether the change is told apart from chance: its interval is known and does not contain 0."""
        return self.interval is not None and not self.interval[0] <= 0.0 <= self.interval[1]

    def said_interval(self) -> str:
        """Format the interval, such as `[+0.45, +0.58]`."""
        return "[unknown]" if self.interval is None else "[{:+.2f}, {:+.2f}]".format(*self.interval)

    @property
    def doubt(self) -> str:
        """Why the change is not told apart from chance; "" if it is."""
        if self.is_certain:
            return ""
        if self.interval is None and self.before == self.after == 0.0:
            return NOTHING_EARNED
        return MAY_BE_CHANCE if self.change else NO_CHANGE

    def __str__(self) -> str:
        said = (
            f"{self.before:.3f} → {self.after:.3f}, {self.change:+.3f} {self.said_interval()} over "
            f"{counted(self.tasks, 'task')}"
        )
        return f"{said}; {self.doubt}" if self.doubt else said


def gain_of(results: Sequence[Evaluation], measure: str = "reward", *, with_failures: bool = False) -> Gain | None:
    """Return the gain from the first to the last evaluation of a run; None with fewer than two, or if one of them has no mean.

    `measure` is `reward` or a named part. With `with_failures`, failed rollouts count as 0; otherwise they are left out.
    """
    if len(results) < 2:
        return None
    ends = (results[0], results[-1])
    first, last = (each.mean_with_failures(measure) if with_failures else each.mean(measure) for each in ends)
    if first is None or last is None:
        return None
    counts = [each.having(measure) + (each.failed if with_failures else 0) for each in ends]
    errors = [error_of(each, measure, with_failures=with_failures) for each in ends]
    known = [each for each in errors if each is not None]
    if len(known) < 2 or min(counts) < 2 or not any((first, last, *known)):
        return Gain(first, last, None, min(counts))
    half = student(0.5 + LEVEL / 2, _freedom(known, counts)) * math.hypot(*known)
    return Gain(first, last, (last - first - half, last - first + half), min(counts))


def _freedom(errors: Sequence[float], counts: Sequence[int]) -> int:
    """Return the degrees of freedom of a difference of means with these standard errors over so many values, rounded down
    (Welch and Satterthwaite): those of the less certain mean where one mean is much less certain than the other."""
    spread = math.fsum(error**4 / (count - 1) for error, count in zip(errors, counts, strict=True))
    return max(1, math.floor(math.hypot(*errors) ** 4 / spread + 1e-9)) if spread else sum(counts) - len(counts)


def error_of(result: Evaluation, measure: str = "reward", *, with_failures: bool = False) -> float | None:
    """Return the standard error of an evaluation's mean; None if the spread of the measure was not recorded. Values that are
    all equal do not show how much others would vary, so the deviation is taken as at least a tenth of the mean: 0 if all
    values are 0."""
    mean = result.mean(measure) or 0.0
    deviation = result.deviation if measure == "reward" else result.deviations.get(measure)
    if deviation is None:
        return None
    count = result.having(measure) + (result.failed if with_failures else 0)
    share = result.failed / max(count, 1) if with_failures else 0.0
    spread = math.sqrt((1.0 - share) * deviation**2 + share * (1.0 - share) * mean**2)
    return max(spread, 0.1 * abs((1.0 - share) * mean)) / math.sqrt(max(count - 1, 1))


def margin(result: Evaluation) -> float | None:
    """Return half the width of the interval at `LEVEL` of an evaluation's `score`; None for fewer than two tasks, if nothing is
    known, or if all rewards are 0, which do not show how much others would vary."""
    if not result.known or result.rollouts < 2 or not result.error:
        return None
    return student(0.5 + LEVEL / 2, result.rollouts - 1) * result.error


def student(p: float, freedom: int) -> float:
    """Return a quantile of Student's distribution: exact for one and two degrees of freedom, else by the Cornish-Fisher
    expansion, which is less than 1 % off."""
    if freedom == 1:
        return math.tan(math.pi * (p - 0.5))
    if freedom == 2:
        return (2 * p - 1) / math.sqrt(2 * p * (1 - p))
    z = NormalDist().inv_cdf(p)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + math.fsum(term / math.pow(freedom, power) for power, term in enumerate(terms, 1))
