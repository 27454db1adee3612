"""Refuses a plugin whose hooks could never be called as its author meant, and says what to write instead.

The invariant: what passes has only hooks that exist, with arguments that those have.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pluggy

from lightning import hooks
from lightning.errors import PluginError
from lightning.plugins.info import near

ALONE = ("lightning_install", "lightning_identify")
"""Hooks that are called plugin by plugin, so that a wrapper around them would never run."""


def check(manager: pluggy.PluginManager, plugin: object) -> None:
    """Raise `PluginError` for the first thing in a plugin that cannot work."""
    specs = hook_names(manager)
    for name in dir(plugin):
        options = manager.parse_hookimpl_opts(plugin, name)
        if options is None:
            if name in specs and _is_its_own(plugin, name):
                raise PluginError(f"its function {name} is not marked as a hook: put @lightning.hookimpl above it")
            continue
        spec = options.get("specname") or name
        if spec in specs:
            _check_arguments(spec, getattr(plugin, name))
        elif not options["optionalhook"]:
            raise PluginError(f"it implements {spec!r}, which is no hook{near(spec, specs)}")
        if spec in ALONE and (options["wrapper"] or options["hookwrapper"]):
            raise PluginError(f"its {spec} is a wrapper; this hook takes plain functions only")


def hook_names(manager: pluggy.PluginManager) -> list[str]:
    """Every hook that `lightning.hooks` specifies."""
    return [name for name in dir(hooks) if manager.parse_hookspec_opts(hooks, name) is not None]


def _check_arguments(spec: str, function: Callable[..., object]) -> None:
    wanted = list(inspect.signature(getattr(hooks, spec)).parameters)
    given = inspect.signature(function).parameters.values()
    extra = [item.name for item in given if item.name not in wanted and item.default is item.empty]
    if extra:
        raise PluginError(f"its {spec} takes {', '.join(extra)!r}; the hook is {spec}({', '.join(wanted)})")


def _is_its_own(plugin: object, name: str) -> bool:
    function = getattr(plugin, name)
    return inspect.isfunction(function) and function.__module__ == getattr(plugin, "__name__", type(plugin).__module__)
