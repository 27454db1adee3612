"""What a rollout's return is made of besides the agent's own reward: tools that earn something, and answers that are too long.

The invariant: everything here is a pure function of what was recorded, and gives new trajectories; what was recorded stays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning.batch.flaws import is_trained
from lightning.batch.trajectory import Group, Trajectory
from lightning.credit.intermediate import ToolReward, with_tool_rewards
from lightning.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Overlong:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), times `penalty`, on the tokens that all trained calls
    of a rollout generated together: 0 up to `max_tokens` - `buffer`, from there falling linearly to -1 at `max_tokens`, and
    -1 beyond."""

    max_tokens: int
    buffer: int = 0
    penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or not 0 <= self.buffer <= self.max_tokens:
            raise ConfigError(
                f"overlong_tokens={self.max_tokens} with overlong_buffer={self.buffer}: the tokens a rollout may generate "
                "must be positive, and the buffer lies inside them"
            )
        if not 0.0 <= self.penalty < float("inf"):
            raise ConfigError(f"overlong_penalty={self.penalty} must be a finite number that is not negative")

    def __call__(self, tokens: int) -> float:
        """What a rollout that generated so many tokens is punished with: a number from -`penalty` to 0."""
        over = tokens - (self.max_tokens - self.buffer)
        if over <= 0:
            return 0.0
        return -self.penalty * (min(1.0, over / self.buffer) if self.buffer else 1.0)


def with_rules(group: Group, tool_reward: ToolReward | None = None, overlong: Overlong | None = None) -> Group:
    """The group with what its tools earned as step rewards, and its punished lengths taken off the agents' rewards."""
    members = group.trajectories
    if tool_reward is not None:
        members = tuple(with_tool_rewards(member, tool_reward) for member in members)
    if overlong is not None:
        members = tuple(_punished(member, overlong) for member in members)
    return group if members is group.trajectories else Group(group.id, members)


def trained_tokens(trajectory: Trajectory) -> int:
    """Response tokens of the calls that are trained."""
    calls = zip(trajectory.transitions, trajectory.trainable, strict=True)
    return sum(len(call.response_ids) for call, trainable in calls if is_trained(call, trainable))


def _punished(trajectory: Trajectory, overlong: Overlong) -> Trajectory:
    punishment = overlong(trained_tokens(trajectory))
    if not punishment:
        return trajectory
    return replace(trajectory, rollout=replace(trajectory.rollout, reward=trajectory.reward + punishment))
