"""The command that proves what a run was trained on, forks of runs, and recorded steps taken again, as a plugin."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl, later

if TYPE_CHECKING:
    from lightning.config import Config
    from lightning.trainer.run_stages import RunStage


@hookimpl
def register_commands(register: Callable[[str, Callable[[], Callable[..., None]]], None]) -> None:
    """The command of this plugin."""
    register(
        "audit",
        later("lightning_proof.audit_command:audit", "Check that a run was trained on exactly what its store holds."),
    )


@hookimpl
def register_run_stages(register: Callable[[str, Callable[[Config], RunStage | None]], None]) -> None:
    """`forks` and `bring_forward`."""
    from lightning_proof.bring_forward import Resumes
    from lightning_proof.fork import Forks

    register("forks", lambda config: Forks())
    register("bring_forward", lambda config: Resumes())
