"""Finds plugins by the entry-point group `lightning`, loads them, and hands out what they registered.

The invariant: a plugin that cannot be loaded or misbehaves is named and left out; it never stops another one. First-party
plugins take the same road as a stranger's.
"""

from __future__ import annotations

from lightning.plugins.discovery import DISABLE, GROUP, PluginInfo, State
from lightning.plugins.manager import Plugins, plugins

__all__ = ["DISABLE", "GROUP", "PluginInfo", "Plugins", "State", "plugins", "register"]


def register(plugin: object) -> PluginInfo:
    """Register an object of this script as a plugin (`Plugins.register`), before a `Trainer` is made."""
    return plugins().register(plugin)
