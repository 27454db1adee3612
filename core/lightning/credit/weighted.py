"""Which groups count more: another credit's advantages, times a weight that the group's own success decides.

The invariant: all calls of a group have the same weight, so that what the other credit says of them stays in proportion. A
group that is solved half of the time has the weight 1, and one whose returns differ always has one above 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import numpy.typing as npt

from lightning.batch.trajectory import Group
from lightning.credit.protocol import GroupAdvantage, group_returns
from lightning.errors import ConfigError

if TYPE_CHECKING:
    from lightning.credit.protocol import Credit

WeightBy = Literal["difficulty", "variance"]


@dataclass(frozen=True, slots=True)
class Weighted:
    """The advantages of `credit` (a registered name or an object), times a weight of the group's.

    The success s of a rollout is its return in the range from `worst` to `best`, as a number from 0 to 1; a return outside
    widens the range for its group. With the group's mean p the weight is, by

    - `difficulty`: 2 (1 - p). Hard tasks count more, up to twice. GRPO-LEAD (arXiv 2504.09696) weights by difficulty, too,
      on a logistic curve, and good answers otherwise than bad ones.
    - `variance`: 4 Var(s), which for rewards of 0 and 1 is 4 p (1 - p): tasks of which half is solved count most
      (arXiv 2502.12272 chooses tasks by it). Beside a low level that divides by the deviation of the group, as `grpo` does,
      it takes back what that adds to nearly solved and nearly hopeless groups.

    A weight that depends on the group's own returns biases the gradient: a group that was lucky counts otherwise. A credit that
    adds rewards of its own is refused, since the weight would not know them: `Judge(..., credit=Weighted(...))` weights by
    the judged returns.
    """

    credit: str | Credit = "identical"
    by: WeightBy = "difficulty"
    worst: float = 0.0
    best: float = 1.0

    def __post_init__(self) -> None:
        if not (isinstance(self.credit, str) or callable(self.credit)) or isinstance(self.credit, type):
            raise ConfigError(f"credit={self.credit!r}: give a registered name, or a function of a group")
        if not isinstance(self.credit, str):
            _without_rewards(self.credit)
        if self.by not in get_args(WeightBy):
            raise ConfigError(f"by={self.by!r} is no weight: use one of {', '.join(get_args(WeightBy))}")
        if not (isfinite(self.worst) and isfinite(self.best) and self.worst < self.best):
            raise ConfigError(
                f"worst={self.worst} and best={self.best} are no range of rewards: give the lower one as worst"
            )

    def __call__(self, group: Group, advantage: GroupAdvantage) -> list[npt.NDArray[np.float64]]:
        """One array of advantages, shape (calls,), for each trajectory."""
        weight = self.weight(group)
        return [weight * np.asarray(part, dtype=np.float64) for part in self._credit()(group, advantage)]

    def weight(self, group: Group) -> float:
        """What a group's advantages are multiplied by: 0 to 2."""
        returns = group_returns(group)
        if not len(returns):
            return 1.0
        worst, best = min(self.worst, float(returns.min())), max(self.best, float(returns.max()))
        success = (returns / 2 - worst / 2) / (best / 2 - worst / 2)  # halves: the range of large ones overflows
        return float(2.0 * (1.0 - success.mean()) if self.by == "difficulty" else 4.0 * success.var())

    @property
    def critic(self) -> bool:
        """Whether the other credit wants a critic's values."""
        return bool(getattr(self._credit(), "critic", False))

    @property
    def value_targets(self) -> Callable[..., object] | None:
        """What its critic should learn; None for a credit without one."""
        found: Callable[..., object] | None = getattr(self._credit(), "value_targets", None)
        return found

    def _credit(self) -> Credit:
        if not isinstance(self.credit, str):
            return self.credit
        from lightning.plugins import plugins

        return _without_rewards(plugins().credit(self.credit))


def _without_rewards(credit: Credit) -> Credit:
    """The credit. Raises `ConfigError` for one that adds rewards, such as a judge: a weight knows those of the agents alone."""
    if getattr(credit, "rewards", False):
        name = type(credit).__name__
        raise ConfigError(
            f"Weighted cannot wrap {name}, which adds rewards that a weight would not know: put the weight inside it, "
            f"{name}(..., credit=Weighted(...))"
        )
    return credit
