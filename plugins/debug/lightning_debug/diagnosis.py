"""What rules look at, and what they find: the record of some attempts, and the course of a run.

The invariant: a finding says on what it rests, so that whoever reads it can look there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lightning.batch import Trajectory
from lightning.engines.logprob_gap import FLOAT32, GapBound
from lightning.trainer.stages import Alarm
from lightning.trainer.summary import Evaluation
from lightning.types import Status, ToolEvent, Transition


@dataclass(frozen=True, slots=True)
class Diagnosis(Alarm):
    """An alarm that a rule has given. A `minor` one is worth a word in a dry run alone."""

    minor: bool = False


@dataclass(frozen=True, slots=True)
class Attempted:
    """The model calls of an attempt, refused and failed ones included, and the tool runs that were reported; its reward and its
    group where these are known."""

    calls: Sequence[Transition]
    tool_events: Sequence[ToolEvent]
    reward: float | None = None
    group: str = ""

    @classmethod
    def of(cls, trajectory: Trajectory) -> Attempted:
        """What a trajectory has of it."""
        rollout = trajectory.rollout
        reward = rollout.reward if rollout.status is Status.SUCCEEDED else None
        return cls((*trajectory.transitions, *trajectory.refused), trajectory.tool_events, reward, rollout.group)


@dataclass(frozen=True, slots=True)
class Course:
    """The metrics of a run's steps, from the first one on, and its held-out evaluations so far. `gap` is the bound on what
    trainer and sampler may differ by. Where the `order` of the tasks is not `shuffled`, the training reward follows the choice
    of tasks, too."""

    steps: Sequence[Mapping[str, float]] = ()
    evaluations: Sequence[Evaluation] = ()
    gap: GapBound = FLOAT32
    order: str = "shuffled"

    @property
    def measured(self) -> list[Evaluation]:
        """The evaluations that say something of these steps."""
        return [result for result in self.evaluations if result.known and result.step <= len(self.steps)]

    @property
    def last(self) -> Mapping[str, float]:
        """The metrics of the last step; empty before the first."""
        return self.steps[-1] if self.steps else {}


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the rules look at: attempts, the globs of the agents that are trained, the errors of rollouts that failed, and the
    course of the run."""

    attempts: Sequence[Attempted] = ()
    train_agents: Sequence[str] = ()
    failures: Sequence[str] = ()
    course: Course = field(default_factory=Course)

    @property
    def answered(self) -> Iterator[Transition]:
        """The calls that were answered."""
        return (call for attempt in self.attempts for call in attempt.calls if call.status.answered)
