"""`lightning replay`, as a plugin."""

from __future__ import annotations

from collections.abc import Callable

from lightning.hooks import hookimpl


@hookimpl
def register_commands(register: Callable[[str, Callable[[], Callable[..., None]]], None]) -> None:
    """`replay`."""
    register("replay", replay_command)


def replay_command() -> Callable[..., None]:
    """Run a recorded rollout again, answered from the record."""
    from lightning_debug.command import replay

    return replay
