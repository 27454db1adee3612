"""A credit that multiplies another credit's advantages by a weight of the group, computed from the success of its rollouts.

The invariant: all calls of a group have the same weight, so the proportions between the other credit's advantages stay. A group
in which half of the rollouts succeed has the weight 1, and a group whose returns differ has a weight above 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import numpy.typing as npt
from lightning.batch import Advantages, Group, PerToken
from lightning.config import refuse_class, refuses_unknown
from lightning.credit import GroupAdvantage, group_returns
from lightning.errors import ConfigError

if TYPE_CHECKING:
    from lightning.credit import Credit

WeightBy = Literal["difficulty", "variance"]


@refuses_unknown
@dataclass(frozen=True, slots=True)
class Weighted:
    """The advantages of `credit` (a registered name or an object), times a weight of the whole group.

    The success s of a rollout is the place of its return in the range from `worst` to `best`, as a number from 0 to 1; a return
    outside of the range widens it for the group. With p the mean of s over the group, the weight is, by

    - `difficulty`: 2 (1 - p). Hard tasks count more, up to twice. GRPO-LEAD (arXiv 2504.09696) weights by difficulty, too,
      but on a logistic curve, which differs for good and bad answers.
    - `variance`: 4 Var(s), which for rewards of 0 and 1 is 4 p (1 - p): tasks that are solved half of the time count most
      (arXiv 2502.12272 chooses tasks by it). A low level that divides by the deviation of the group, as `grpo` does, raises
      nearly solved and nearly hopeless groups; this weight undoes that.

    A weight that depends on the group's own returns biases the gradient, since the same task weighs differently after a lucky
    sample. A credit that adds rewards of its own is refused, since the weight would not include them: write
    `Judge(..., credit=Weighted(...))` to weight by the judged returns.
    """

    credit: str | Credit = "identical"
    by: WeightBy = "difficulty"
    worst: float = 0.0
    best: float = 1.0

    def __post_init__(self) -> None:
        refuse_class(self.credit, "the credit")
        if not (isinstance(self.credit, str) or callable(self.credit)):
            raise ConfigError(f"credit={self.credit!r}: give a registered name, or a function of a group")
        if not isinstance(self.credit, str):
            _without_rewards(self.credit)
        if self.by not in get_args(WeightBy):
            raise ConfigError(f"by={self.by!r} is no weight: use one of {', '.join(get_args(WeightBy))}")
        if not (isfinite(self.worst) and isfinite(self.best) and self.worst < self.best):
            raise ConfigError(
                f"worst={self.worst} must be lower than best={self.best}, and both must be finite: give the lowest reward as "
                "worst and the highest reward as best"
            )

    def __call__(self, group: Group, advantage: GroupAdvantage) -> Advantages:
        """Return the wrapped credit's advantages, of calls or of their tokens, times the group's weight."""
        weight = self.weight(group)
        return [_times(weight, own) for own in self._credit()(group, advantage)]

    def weight(self, group: Group) -> float:
        """Return the factor for a group's advantages, from 0 to 2; 1 for a group without rollouts."""
        returns = group_returns(group)
        if not len(returns):
            return 1.0
        worst, best = min(self.worst, float(returns.min())), max(self.best, float(returns.max()))
        success = (returns / 2 - worst / 2) / (best / 2 - worst / 2)  # halves: the range of large ones overflows
        return float(2.0 * (1.0 - success.mean()) if self.by == "difficulty" else 4.0 * success.var())

    @property
    def head(self) -> str:
        """The head whose values the wrapped credit needs; "" without a head."""
        return str(getattr(self._credit(), "head", None) or "")

    @property
    def value_targets(self) -> Callable[..., object] | None:
        """The wrapped credit's method that gives the values for its head to learn; None for a credit without a head."""
        found: Callable[..., object] | None = getattr(self._credit(), "value_targets", None)
        return found

    def _credit(self) -> Credit:
        from lightning.plugins import plugins

        return _without_rewards(plugins().credit(self.credit))


def _times(
    weight: float, own: Sequence[PerToken] | npt.NDArray[np.floating]
) -> Sequence[PerToken] | npt.NDArray[np.floating]:
    """Return a rollout's advantages, of calls or of their tokens, times a weight."""
    with suppress(ValueError):  # answers of different lengths, or numbers beside arrays
        whole: npt.NDArray[np.float64] = weight * np.asarray(own, dtype=np.float64)
        return whole
    return [weight * np.asarray(value, dtype=np.float64) for value in own]


def _without_rewards(credit: Credit) -> Credit:
    """Return the credit. Raises `ConfigError` for a credit that adds rewards, such as a judge: a group's weight is computed
    from the agents' rewards alone."""
    if getattr(credit, "rewards", False):
        name = type(credit).__name__
        raise ConfigError(
            f"Weighted cannot wrap {name}, which adds rewards that the weight would leave out: put the weight inside it, "
            f"{name}(..., credit=Weighted(...))"
        )
    return credit
