"""`lightning replay`, `lightning reward` and `lightning profile`, as a plugin."""

from __future__ import annotations

from collections.abc import Callable

from lightning.hooks import hookimpl


@hookimpl
def register_commands(register: Callable[[str, Callable[[], Callable[..., None]]], None]) -> None:
    """`replay`, `reward` and `profile`."""
    register("replay", replay_command)
    register("reward", reward_command)
    register("profile", profile_command)


def replay_command() -> Callable[..., None]:
    """Run a recorded rollout again, answered from the record."""
    from lightning_debug.command import replay

    return replay


def reward_command() -> Callable[..., None]:
    """Grade a run's rollouts again with another reward function."""
    from lightning_debug.reward_command import reward

    return reward


def profile_command() -> Callable[..., None]:
    """Show where a run's time and tokens went, and what would help."""
    from lightning_debug.profile_command import profile

    return profile
