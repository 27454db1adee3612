"""The command that proves what a run was trained on, as a plugin."""

from __future__ import annotations

from collections.abc import Callable

from lightning.hooks import hookimpl, later


@hookimpl
def register_commands(register: Callable[[str, Callable[[], Callable[..., None]]], None]) -> None:
    """The command of this plugin."""
    register(
        "audit",
        later("lightning_proof.audit_command:audit", "Check that a run was trained on exactly what its store holds."),
    )
