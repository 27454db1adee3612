"""The plugin `verl`: the engine over verl, which is imported when an engine is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING

from lightning.errors import MissingExtraError
from lightning.hooks import hookimpl, later, made_later

if TYPE_CHECKING:
    from lightning.cli.check import Check
    from lightning.config import Config, PluginSettings
    from lightning.engines.protocol import Engine


@hookimpl
def register_settings(register: Callable[[str, Callable[[], type[PluginSettings]]], None]) -> None:
    """Register the settings `engine.verl`."""
    register("engine.verl", later("lightning_verl.config:VerlConfig"))


@hookimpl
def register_engines(register: Callable[[str, Callable[[Config], Engine]], None]) -> None:
    """Register the engine `verl`."""
    register("verl", verl_engine)


@hookimpl
def register_checks(register: Callable[[str, Callable[[str | None], Iterable[Check]]], None]) -> None:
    """Register the checks `gpus` and `verl` of `lightning doctor`."""
    register("gpus", made_later("lightning_verl.gpus:check_gpus"))
    register("verl", made_later("lightning_verl.doctor:check_verl"))


def verl_engine(config: Config) -> Engine:
    """Make a `VerlEngine` from the section `engine`. Raises `MissingExtraError` when verl or Ray is not installed."""
    for package in ("verl", "ray"):
        if find_spec(package) is None:
            raise MissingExtraError("verl", package)
    from lightning_verl.engine import VerlEngine

    return VerlEngine(config)
