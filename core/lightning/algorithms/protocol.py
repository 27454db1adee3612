"""What an algorithm is: finished groups in, weighted and credited training rows plus a loss out.

The invariant: an algorithm is a pure function of transitions and rewards; it never sees the engine, the store or a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lightning.engines.protocol import Loss, Sample
from lightning.types import Rollout, StepReward, ToolEvent, Transition


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One succeeded rollout with everything recorded about it. `transitions` are its OK calls in `seq` order;
    `trainable[i]` says whether call i belongs to the component of interest."""

    rollout: Rollout
    transitions: tuple[Transition, ...]
    trainable: tuple[bool, ...]
    tool_events: tuple[ToolEvent, ...] = ()
    step_rewards: tuple[StepReward, ...] = ()

    @property
    def reward(self) -> float:
        assert self.rollout.reward is not None, "only succeeded rollouts become trajectories"
        return self.rollout.reward


@dataclass(frozen=True, slots=True)
class Group:
    """The trajectories of one task (GRPO's group), in `rollout.index` order; failed rollouts are absent."""

    id: str
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """What one optimizer step trains on. `used` lists the rollouts that have a row, `skipped` counts groups left out by
    reason (for example `{"all_rewards_equal": 3}`)."""

    samples: tuple[Sample, ...]
    used: tuple[Rollout, ...]
    skipped: dict[str, int] = field(default_factory=dict)


class Algorithm(Protocol):
    """`group_size` rollouts are sampled per task; `batch` turns the finished groups into rows, `loss` trains them."""

    @property
    def name(self) -> str: ...

    @property
    def group_size(self) -> int: ...

    def batch(self, groups: Sequence[Group]) -> Batch: ...

    @property
    def loss(self) -> Loss: ...
