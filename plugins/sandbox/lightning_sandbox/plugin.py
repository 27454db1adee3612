"""The plugin `sandbox`: a sandbox for agents, and limits on their tools. Each is a stage around attempts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl, later, made_later

if TYPE_CHECKING:
    from lightning.config import PluginSettings, RunnerConfig
    from lightning.runner.stages import AttemptStage


@hookimpl
def register_settings(register: Callable[[str, Callable[[], type[PluginSettings]]], None]) -> None:
    """Register the settings of sandboxes and of limits on tools."""
    register("sandbox", later("lightning_sandbox.config:SandboxConfig"))


@hookimpl
def register_attempt_stages(register: Callable[[str, Callable[[RunnerConfig], AttemptStage | None]], None]) -> None:
    """Register the stages `sandbox` and `tool_limits`."""
    register("sandbox", made_later("lightning_sandbox.sandbox:stage_for"))
    register("tool_limits", made_later("lightning_sandbox.tool_slots:limits_for"))
