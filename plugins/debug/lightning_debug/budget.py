"""The step stage `budget`: it counts what a run spends, and ends the run after the step at which its budget is spent.

The invariant: the counts are metrics of the steps, so that a resumed run goes on counting where it was. Only what was counted
is compared with a limit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from lightning.config import Config
from lightning.outside_requests import OUTSIDE
from lightning.safe_text import counted
from lightning.trainer.metrics import sampled_tokens
from lightning.trainer.stages import Added, Alarm, StepStage, StepTaken
from lightning.trainer.summary import Evaluation

from lightning_debug.config import BudgetConfig

logger = logging.getLogger(__name__)

NAME: Final = "budget"
"""The stage, its settings' section, and the beginning of its metrics."""
SPENT: Final[Mapping[str, str]] = {
    "sampled_tokens": "sampled tokens",
    "trained_tokens": "trained tokens",
    "seconds": "seconds",
    "requests": "requests of judges, optimizers and providers",
}
"""What is counted, in words, by the name of its setting and of its metric."""


class SpentBudget(StepStage):
    """Compares a run's counts with its budget before each step. `clock` is in seconds."""

    api, after = 1, ("record", "advice")

    def __init__(self, budget: BudgetConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits: dict[str, float] = {name: limit for name in SPENT if (limit := getattr(budget, name)) is not None}
        self._clock, self._at = clock, clock()
        self._spent = dict.fromkeys(SPENT, 0.0)
        self._evaluated: int | None = None
        """The steps before the last evaluation; None without held-out tasks."""
        self._taught = 0
        """The last step that changed the weights."""

    async def begun(self, steps: Sequence[Mapping[str, float]], evaluations: Sequence[Evaluation]) -> Iterable[Alarm]:
        """Add up the counts of the steps before, and begin to count requests."""
        self._spent = {name: sum(step.get(f"{NAME}/{name}", 0.0) for step in steps) for name in SPENT}
        if without := sum(f"{NAME}/seconds" not in step for step in steps):
            logger.warning(
                "%s taken without a budget, and not counted in it",
                counted(without, "earlier step was", "earlier steps were"),
            )
        limit = self._limits.get("requests")
        OUTSIDE.begin(
            None if limit is None else int(limit), f"{NAME}.requests is {limit}", int(self._spent["requests"])
        )
        self._at = self._clock()
        self._taught = max((number for number, step in enumerate(steps, 1) if step.get("stepped", 1.0)), default=0)
        return await self.evaluated(evaluations)

    async def evaluated(self, evaluations: Sequence[Evaluation]) -> Iterable[Alarm]:
        """Remember which model was evaluated last."""
        self._evaluated = evaluations[-1].step if evaluations else self._evaluated
        return ()

    async def taken(self, step: StepTaken) -> Added:
        """Count a step."""
        now = self._clock()
        found = {
            "sampled_tokens": float(sampled_tokens(step.groups)),
            "trained_tokens": step.metrics.get("tokens", 0.0),
            "seconds": now - self._at,
            "requests": OUTSIDE.count - self._spent["requests"],
        }
        self._at, self._taught = now, step.step if step.metrics.get("stepped", 1.0) else self._taught
        for name, count in found.items():
            self._spent[name] += count
        return Added(metrics=found)

    def ends(self) -> str:
        """Why the run is to end: the first part of the budget that is spent."""
        for name, limit in self._limits.items():
            if (spent := self._spent[name]) >= limit:
                return (
                    f"spent {spent:,.0f} {SPENT[name]}, and {NAME}.{name} is {limit:,.0f}; go on with --resume and a larger "
                    f"budget (--set {NAME}.{name}=N){self._not_evaluated()}"
                )
        return ""

    def _not_evaluated(self) -> str:
        """Say that the last model was not evaluated, and what evaluates it; "" if it was, or no held-out tasks were given."""
        if self._evaluated is None or self._taught <= self._evaluated:
            return ""
        return (
            f". The held-out tasks were last run after step {self._evaluated}, and the weights have changed since: evaluate "
            f"them with `lightning eval RUN@{self._taught} MODULE:FUNCTION --tasks HELD_OUT.jsonl`"
        )

    async def ended(self) -> None:
        """Requests are limited no more."""
        OUTSIDE.end()


def budget(config: Config) -> SpentBudget | None:
    """Make the stage for a run with a budget; None for a run without."""
    asked = BudgetConfig.of(config)
    return None if asked == BudgetConfig() else SpentBudget(asked)
