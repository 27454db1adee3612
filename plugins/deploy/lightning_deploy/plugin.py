"""`lightning deploy` and `lightning sweep`, as a plugin."""

from __future__ import annotations

from collections.abc import Callable

from lightning.hooks import hookimpl


@hookimpl
def register_commands(register: Callable[[str, Callable[[], Callable[..., None]]], None]) -> None:
    """`deploy` and `sweep`."""
    register("deploy", deploy_command)
    register("sweep", sweep_command)


def deploy_command() -> Callable[..., None]:
    """Write the files of a deployment: images, Compose, Kubernetes or SkyPilot."""
    from lightning_deploy.deploy_command import deploy

    return deploy


def sweep_command() -> Callable[..., None]:
    """Train with several seeds and settings, and compare."""
    from lightning_deploy.sweep import sweep

    return sweep
