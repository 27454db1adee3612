"""The plugin `policies`: several policies in one run, each for agents of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl, later, made_later

if TYPE_CHECKING:
    from lightning.config import PluginSettings
    from lightning.gateway.calls import Parts
    from lightning.gateway.stages import CallStage


@hookimpl
def register_settings(register: Callable[[str, Callable[[], type[PluginSettings]]], None]) -> None:
    """Register the settings `policies.NAME`."""
    register("policies", later("lightning_policies.config:PoliciesConfig"))


@hookimpl
def register_call_stages(register: Callable[[str, Callable[[Parts], CallStage | None]], None]) -> None:
    """Register the call stage `policies`, which chooses the policy of a call."""
    register("policies", made_later("lightning_policies.stage:stage"))
