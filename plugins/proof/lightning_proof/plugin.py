"""The command that proves what a run was trained on, as a plugin."""

from __future__ import annotations

from collections.abc import Callable

from lightning.hooks import hookimpl


@hookimpl
def register_commands(register: Callable[[str, Callable[[], Callable[..., None]]], None]) -> None:
    """The command of this plugin."""
    register("audit", audit_command)


def audit_command() -> Callable[..., None]:
    """Check that a run was trained on exactly what its store holds."""
    from lightning_proof.audit_command import audit

    return audit
