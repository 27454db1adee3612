"""The plugin `harnesses`: calls that are recorded and not trained, by rules and by what known programs ask for."""

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
    """Register the settings `untrained.NAME`."""
    register("untrained", later("lightning_harnesses.config:RulesConfig"))


@hookimpl
def register_call_stages(register: Callable[[str, Callable[[Parts], CallStage | None]], None]) -> None:
    """Register the call stage `harnesses`, which marks the calls that a rule matches."""
    register("harnesses", made_later("lightning_harnesses.stage:HarnessesStage"))
