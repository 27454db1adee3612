"""The prompts plugin: prompt optimisation with APO."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl, later

if TYPE_CHECKING:
    from lightning.algorithms.protocol import Algorithm, SearchAlgorithm
    from lightning.config import PluginSettings


@hookimpl
def register_settings(register: Callable[[str, Callable[[], type[PluginSettings]]], None]) -> None:
    """Register the settings `optimizer_model`."""
    register("optimizer_model", later("lightning_prompts.config:OptimizerModelConfig"))


@hookimpl
def register_algorithms(register: Callable[[str, Callable[..., Algorithm | SearchAlgorithm]], None]) -> None:
    """Register the algorithm `apo`."""
    from lightning_prompts.apo import APO

    register("apo", APO)
