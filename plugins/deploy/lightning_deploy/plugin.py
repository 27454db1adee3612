"""The plugin `deploy`: the commands `lightning deploy` and `lightning sweep`."""

from __future__ import annotations

from collections.abc import Callable

from lightning.hooks import hookimpl, later


@hookimpl
def register_commands(register: Callable[[str, Callable[[], Callable[..., None]]], None]) -> None:
    """Register the commands `deploy` and `sweep`."""
    register(
        "deploy",
        later(
            "lightning_deploy.deploy_command:deploy",
            "Write the files of a deployment: images, Compose, Kubernetes or SkyPilot.",
        ),
    )
    register("sweep", later("lightning_deploy.sweep:sweep", "Train with several seeds and settings, and compare."))
