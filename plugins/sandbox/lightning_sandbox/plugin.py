"""Agents in a sandbox, as a plugin: a stage around attempts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl

if TYPE_CHECKING:
    from lightning.config import RunnerConfig
    from lightning.runner.stages import AttemptStage


@hookimpl
def register_attempt_stages(register: Callable[[str, Callable[[RunnerConfig], AttemptStage | None]], None]) -> None:
    """`sandbox`."""
    from lightning_sandbox.stage import SANDBOX, stage_for

    register(SANDBOX, stage_for)
