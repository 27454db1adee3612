"""Finished rollouts as the learning algorithms see them."""

from __future__ import annotations

from dataclasses import dataclass

from lightning.types import Rollout, StepReward, ToolEvent, Transition


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One succeeded rollout with everything recorded about it. `transitions` are its answered calls in `seq` order;
    `trainable[i]` says whether call i belongs to the component of interest. With a critic, `values[i]` is its value of call
    i's state before the step (NaN for calls that are not trained); without one `values` is empty. `refused` are the
    calls of which the gateway or vLLM did not take the request."""

    rollout: Rollout
    transitions: tuple[Transition, ...]
    trainable: tuple[bool, ...]
    tool_events: tuple[ToolEvent, ...] = ()
    step_rewards: tuple[StepReward, ...] = ()
    values: tuple[float, ...] = ()
    refused: tuple[Transition, ...] = ()

    @property
    def reward(self) -> float:
        """What the reward function gave."""
        assert self.rollout.reward is not None, "only succeeded rollouts become trajectories"
        return self.rollout.reward


@dataclass(frozen=True, slots=True)
class Group:
    """The trajectories of one task (GRPO's group), in `rollout.index` order; failed rollouts are absent."""

    id: str
    trajectories: tuple[Trajectory, ...]
