"""`lightning sweep`, as a plugin."""

from __future__ import annotations

from collections.abc import Callable

from lightning.hooks import hookimpl


@hookimpl
def register_commands(register: Callable[[str, Callable[[], Callable[..., None]]], None]) -> None:
    """`sweep`."""
    register("sweep", sweep_command)


def sweep_command() -> Callable[..., None]:
    """Train with several seeds and settings, and compare."""
    from lightning_deploy.command import sweep

    return sweep
