"""The plugin `proof`: the command `audit`, and the run stages for forks and for steps that are taken again at a resume."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl, later

if TYPE_CHECKING:
    from lightning.config import Config
    from lightning.trainer.run_stages import RunStage


@hookimpl
def register_commands(register: Callable[[str, Callable[[], Callable[..., None]]], None]) -> None:
    """Register the command `audit`."""
    register(
        "audit",
        later("lightning_proof.audit_command:audit", "Check that a run was trained on exactly what its store holds."),
    )


@hookimpl
def register_run_stages(register: Callable[[str, Callable[[Config], RunStage | None]], None]) -> None:
    """Register the run stages `forks` and `bring_forward`."""
    from lightning_proof.bring_forward import Resumes
    from lightning_proof.fork import Forks

    register("forks", lambda config: Forks())
    register("bring_forward", lambda config: Resumes())
