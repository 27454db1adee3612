"""The plugin `sandbox`: a sandbox for agents, and limits on their tools. Each is a stage around attempts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl

if TYPE_CHECKING:
    from lightning.config import RunnerConfig
    from lightning.runner.stages import AttemptStage


@hookimpl
def register_attempt_stages(register: Callable[[str, Callable[[RunnerConfig], AttemptStage | None]], None]) -> None:
    """Register the stages `sandbox` and `tool_limits`."""
    from lightning_sandbox.sandbox import SANDBOX, stage_for
    from lightning_sandbox.tool_slots import TOOL_LIMITS, limits_for

    register(SANDBOX, stage_for)
    register(TOOL_LIMITS, limits_for)
