"""The interface of an algorithm: from finished groups to training rows with advantages and weights, and a loss.

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
    from lightning.config import Config
    from lightning.losses.policy_gradient import OwnLoss
    from lightning.tracking.trackers import Trackers
    from lightning.trainer.stack import Stack
    from lightning.trainer.summary import Reporter


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows that one optimizer step trains on. `used` lists the rollouts that have a row, `skipped` counts *groups* left out
    by reason (for example `{"all_rewards_equal": 3}`), `dropped` counts *rollouts* left out of their group by reason. `loss` is
    the loss of this batch alone, if it depends on the rollouts (pairs of them); None uses an algorithm's loss. `algorithm` is
    the algorithm that made the rows, or None; `loss_for` says when its loss is used."""

    samples: tuple[Sample, ...]
    used: tuple[Rollout, ...]
    skipped: dict[str, int] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)
    loss: Loss | None = None
    algorithm: Algorithm | None = None

    def loss_for(self, algorithm: Algorithm, given: Loss | OwnLoss | None = None) -> Loss:
        """Return the loss that the rows are trained with, where `algorithm` is the trainer's: the loss that a loop has `given`
        for them, a `Loss` or a function that returns one loss for each token; else the batch's own `loss`; else, if
        `algorithm.passes_on_losses` is true, the loss of the algorithm that made the rows; else `algorithm.loss`."""
        if given is not None:
            from lightning.losses.custom_loss import as_loss

            return as_loss(given, "forward_backward(loss=...)")
        if self.loss is not None:
            return self.loss
        passes_on = self.algorithm is not None and getattr(algorithm, "passes_on_losses", False)
        return self.algorithm.loss if self.algorithm is not None and passes_on else algorithm.loss


class Algorithm(Protocol):
    """An algorithm: `group_size` rollouts are sampled for each task, `batch` turns the finished groups into rows, and the
    engine minimises `loss` on these rows."""

    @property
    def name(self) -> str:
        """The algorithm's registered name. The factory of this name makes an equal algorithm from the values of the algorithm's
        fields."""

    @property
    def group_size(self) -> int:
        """The number of rollouts that are sampled for each task."""

    def batch(self, groups: Sequence[Group]) -> Batch:
        """Return the rows of one optimizer step. A rollout that cannot be trained on must be left out and counted, because an
        error in this method ends the run, and would end each resume of the run."""

    @property
    def loss(self) -> Loss:
        """The loss that the engine minimises on the rows."""


@runtime_checkable
class SearchAlgorithm(Protocol):
    """An algorithm with a loop of its own and without an engine: it runs agents and changes their resources, such as
    prompts."""

    @property
    def name(self) -> str:
        """The algorithm's registered name. The factory of this name makes an equal algorithm from the values of the algorithm's
        fields."""

    def check(self, config: Config, val: Sequence[Task]) -> None:
        """Raise an error, before anything is started, if the algorithm cannot work with the settings or the held-out tasks
        `val`. Warn of settings that it does not use."""

    async def search(
        self,
        stack: Stack,
        train: Sequence[Task],
        val: Sequence[Task],
        reporter: Reporter,
        trackers: Trackers,
        began: float,
    ) -> None:
        """Run the search to its end; in a resumed run, go on from the recorded state. `began` is the time at which the run was
        started, by `time.monotonic`."""


def teacher_of(algorithm: Algorithm) -> str:
    """Return the teacher that an algorithm learns from, or "" if it has none: a run's step (RUN@STEP), or a model's folder or
    hub name. The engine then opens the teacher as its reference model."""
    return str(getattr(algorithm, "teacher", None) or "")


def head_of(algorithm: Algorithm) -> str:
    """Return the registered name of the head that an algorithm trains and whose values it needs (`Trajectory.values`): its
    attribute `head`, or "" for an algorithm without a head."""
    return str(getattr(algorithm, "head", None) or "")
