"""What an algorithm is: finished groups in, weighted and credited training rows plus a loss out.

The invariant: an algorithm is a pure function of transitions and rewards; it never sees the engine, the store or a clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from lightning.batch.sample import Sample
from lightning.batch.trajectory import Group
from lightning.losses.protocol import Loss
from lightning.types import Rollout, Task

if TYPE_CHECKING:
    from lightning.tracking.trackers import Trackers
    from lightning.trainer.stack import Stack
    from lightning.trainer.summary import Reporter


@dataclass(frozen=True, slots=True)
class Batch:
    """What one optimizer step trains on. `used` lists the rollouts that have a row, `skipped` counts *groups* left out by
    reason (for example `{"all_rewards_equal": 3}`), `dropped` counts *rollouts* left out of their group by reason. `loss` is
    the loss of this very batch, where it depends on the rollouts (pairs of them). `algorithm` has made the rows: where the
    trainer's algorithm brings no loss and only passes another one's batch on, the other's is meant."""

    samples: tuple[Sample, ...]
    used: tuple[Rollout, ...]
    skipped: dict[str, int] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)
    loss: Loss | None = None
    algorithm: Algorithm | None = None

    def loss_for(self, algorithm: Algorithm) -> Loss:
        """The loss that the rows are trained with, where `algorithm` is the trainer's. One that has
        `passes_on_losses = True` leaves it to the one that made the rows."""
        if self.loss is not None:
            return self.loss
        passes_on = self.algorithm is not None and getattr(algorithm, "passes_on_losses", False)
        return self.algorithm.loss if self.algorithm is not None and passes_on else algorithm.loss


class Algorithm(Protocol):
    """`group_size` rollouts are sampled per task; `batch` turns the finished groups into rows, `loss` trains them."""

    @property
    def name(self) -> str:
        """The registered name whose factory makes this algorithm again from its fields."""

    @property
    def group_size(self) -> int:
        """Rollouts per task."""

    def batch(self, groups: Sequence[Group]) -> Batch:
        """The rows of one optimizer step. A rollout that cannot be trained on is left out and counted; whatever ends in an
        error here would end the run, and every resume of it."""

    @property
    def loss(self) -> Loss:
        """What the engine minimises."""


@runtime_checkable
class SearchAlgorithm(Protocol):
    """An algorithm with a loop of its own: it runs agents and changes what they are given, and needs no engine."""

    @property
    def name(self) -> str:
        """The registered name whose factory makes this algorithm again from its fields."""

    def check(self, val: Sequence[Task]) -> None:
        """Refuse held-out tasks that it cannot work with, before anything is started."""

    async def search(
        self,
        stack: Stack,
        train: Sequence[Task],
        val: Sequence[Task],
        reporter: Reporter,
        trackers: Trackers,
        began: float,
    ) -> None:
        """Search to the end, or go on with what the run did before. `began` is when the run's start began, by
        `time.monotonic`."""


def teacher_of(algorithm: Algorithm) -> str:
    """What an algorithm learns from, where it has a `teacher`: a run's step (RUN@STEP), or a model's folder or hub name. The
    engine's reference model is that one then."""
    return str(getattr(algorithm, "teacher", None) or "")


def needs_critic(algorithm: Algorithm) -> bool:
    """Whether an algorithm wants a critic's values (`Trajectory.values`) and trains it: it has `critic = True`."""
    return bool(getattr(algorithm, "critic", False))
