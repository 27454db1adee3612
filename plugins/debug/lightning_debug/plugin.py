"""`lightning replay`, `reward`, `eval` and `ab`, as a plugin."""

from __future__ import annotations

from collections.abc import Callable

from lightning.hooks import hookimpl


@hookimpl
def register_commands(register: Callable[[str, Callable[[], Callable[..., None]]], None]) -> None:
    """`replay`, `reward`, `eval` and `ab`."""
    register("replay", replay_command)
    register("reward", reward_command)
    register("eval", eval_command)
    register("ab", ab_command)


def replay_command() -> Callable[..., None]:
    """Run a recorded rollout again, answered from the record."""
    from lightning_debug.command import replay

    return replay


def reward_command() -> Callable[..., None]:
    """Grade a run's rollouts again with another reward function."""
    from lightning_debug.reward_command import reward

    return reward


def eval_command() -> Callable[..., None]:
    """Measure how good a model is at tasks: avg@k and pass@k."""
    from lightning_debug.eval_command import evaluate

    return evaluate


def ab_command() -> Callable[..., None]:
    """Compare two prompts, models or temperatures until one is better beyond doubt."""
    from lightning_debug.ab_command import ab

    return ab
