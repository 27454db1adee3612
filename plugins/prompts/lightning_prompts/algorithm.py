"""The protocol of prompt algorithms: the fields that their loop reads, and the default start of that loop.

The invariant: an algorithm never sees weights, and gets all results through the bench.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from lightning.errors import ConfigError, DataError
from lightning.safe_text import counted
from lightning.types import Task

from lightning_prompts.protocol import Bench, OptimizerModel

if TYPE_CHECKING:
    from lightning.config import Config, TrainerConfig
    from lightning.tracking.trackers import Trackers
    from lightning.trainer.stack import Stack
    from lightning.trainer.summary import Reporter
    from lightning_resources.nouns import Resource

logger = logging.getLogger(__name__)
UNUSED = ("keep", "patience", "order", "alerts", "max_staleness")
"""Settings of the section `trainer` that are for steps, and a search has none."""


@runtime_checkable
class PromptAlgorithm(Protocol):
    """Finds a better prompt template for one component of an agent. Derive from this class to inherit the loop (`search`)."""

    @property
    def name(self) -> str:
        """The registered name from which this algorithm is made again with its fields."""

    @property
    def component(self) -> str:
        """The component whose prompt is tuned; empty means the only one that has a prompt."""

    @property
    def prompt(self) -> str | None:
        """The template to start from; None means the component's present one, from `runner.prompts` or the agent's code."""

    @property
    def alias(self) -> str:
        """The alias that is pointed to the best prompt at the end."""

    @property
    def max_rollouts(self) -> int | None:
        """Most rollouts of the whole run; None means no bound."""

    @property
    def optimizer_model(self) -> OptimizerModel | None:
        """The model that edits prompts; None means that of the setting `optimizer_model`, or else the policy."""

    async def tune(self, bench: Bench) -> Resource:
        """Search with the bench, and return the best prompt found, which may be the starting one."""

    def check(self, config: Config, val: Sequence[Task]) -> None:
        """Raise `DataError` without held-out tasks, and `ConfigError` for settings of sampling, and if `max_rollouts` allows no
        more than the two held-out evaluations at the beginning and the end."""
        _check_settings(config.trainer)
        if not val:
            raise DataError(
                "prompts are chosen by their reward on held-out tasks, and there are none: give fit() some in `val`"
            )
        if self.max_rollouts is not None and self.max_rollouts <= 2 * len(val):
            raise ConfigError(
                f"max_rollouts={self.max_rollouts} is spent by running {counted(len(val), 'held-out task')} before and after: "
                f"allow more than {2 * len(val)}, or give fewer tasks in `val`"
            )

    async def search(
        self,
        stack: Stack,
        train: Sequence[Task],
        val: Sequence[Task],
        reporter: Reporter,
        trackers: Trackers,
        began: float,
    ) -> None:
        """Run the algorithm in the loop of prompt algorithms (`lightning_prompts.loop.tune`), and point its alias to the best
        prompt."""
        from lightning_prompts.loop import tune

        await tune(stack, self, train, val, reporter, trackers, began)


def _check_settings(asked: TrainerConfig) -> None:
    """Raise `ConfigError` for settings of sampling, since a search samples in its own way, and warn of those that it does not
    use."""
    plain = type(asked)()
    changed = [name for name in type(plain).model_fields if getattr(asked, name) != getattr(plain, name)]
    if "sampling" in changed:
        raise ConfigError(
            f"a search for prompts samples in its own way, and trainer.sampling is {asked.sampling!r}: leave it out"
        )
    if names := [name for name in UNUSED if name in changed]:
        logger.warning("a search for prompts does not use trainer.%s: leave it out", ", trainer.".join(names))
