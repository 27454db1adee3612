"""What is installed: the entry points of the group `lightning`, read without importing anything they name.

The invariant: each plugin has one name; a second distribution that claims it is reported, never silently preferred.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import logging
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib.metadata import Distribution, EntryPoint
from typing import Literal, TypeAlias

from lightning._version import __version__

logger = logging.getLogger(__name__)

GROUP = "lightning"
DISABLE = "LIGHTNING_DISABLE_PLUGINS"
"""A comma-separated list of plugins that are not to be loaded."""

OWN = "lightning"
"""The distribution that the core is in."""

State: TypeAlias = Literal["loaded", "waiting", "broken", "disabled"]


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """One plugin as found. `waits_for` is the module whose import loads it (empty: at once), `hooks` what it implements,
    known once it is loaded, `error` why it is broken or disabled, and `cure` what mends it when it is broken."""

    name: str
    target: str
    distribution: str
    version: str
    state: State
    waits_for: str = ""
    error: str = ""
    hooks: tuple[str, ...] = ()
    cure: str = ""

    def __str__(self) -> str:
        return f"{self.name!r} ({self.distribution} {self.version})"

    def broken(self, error: str, cure: str = "") -> PluginInfo:
        """The same with the reason why it is left out, which is logged, and what mends it where another release does not."""
        if not cure and self.distribution == OWN:
            cure = "reinstall lightning"
        elif not cure:
            cure = f"pip install --upgrade {self.distribution}, or pip uninstall it"
        said = "" if "pip install" in error else f". To mend it: {cure}"
        logger.warning("the plugin %s is broken with lightning %s: %s%s", self, __version__, error, said)
        return replace(self, state="broken", error=error, cure=cure)


def discover() -> tuple[dict[str, EntryPoint], dict[str, PluginInfo]]:
    """Entry points by plugin name, and every plugin's first info; what is broken or disabled has no entry point."""
    disabled = {name for part in os.environ.get(DISABLE, "").split(",") if (name := part.strip())}
    entries: dict[str, EntryPoint] = {}
    infos: dict[str, PluginInfo] = {}
    origins: dict[Distribution | None, tuple[str, str]] = {}
    for entry in importlib.metadata.entry_points(group=GROUP):
        name, _, module = entry.name.partition(".")
        origin, version = origins[entry.dist] = origins.get(entry.dist) or _origin(entry.dist)
        info = PluginInfo(name, entry.value, origin, version, "waiting", module)
        if name in infos:
            first = infos[name]
            if (first.distribution, first.target) != (info.distribution, info.target):
                error = f"the plugin {first} has the same name"
                infos[f"{name}@{origin}"] = info.broken(error, f"pip uninstall {first.distribution} or {origin}")
        elif name in disabled:
            infos[name] = replace(info, state="disabled", error=f"{DISABLE} lists it")
        elif origin != OWN and (unmet := _unmet(entry)):
            infos[name] = info.broken(unmet)
        else:
            entries[name], infos[name] = entry, info
    for name in sorted(disabled - infos.keys()):
        logger.warning("%s lists %r, which is not installed%s", DISABLE, name, near(name, infos))
    return entries, infos


def _origin(distribution: Distribution | None) -> tuple[str, str]:
    """Name and version. Each reading of them parses all of the distribution's metadata, which takes milliseconds."""
    if distribution is None:
        return "unknown", ""
    said = distribution.metadata
    return said["Name"], said["Version"]


def _unmet(entry: EntryPoint) -> str:
    """Why this release is not what a stranger's distribution requires; empty when it is."""
    for text in (entry.dist.requires if entry.dist else None) or ():
        if re.match(rf"{OWN}(?![\w.-])", text, re.IGNORECASE):
            # only where a stranger's plugin is installed
            from packaging.markers import UndefinedEnvironmentName
            from packaging.requirements import Requirement

            try:
                wanted = Requirement(text)
                meant = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
            except (ValueError, UndefinedEnvironmentName) as error:
                return f"its metadata cannot be read: {text!r}: {' '.join(str(error).split())}"
            if meant and not wanted.specifier.contains(__version__, prereleases=True):
                return f"it requires {OWN}{wanted.specifier}, and this is lightning {__version__}"
    return ""


def near(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or a full stop when nothing is near."""
    found = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {found[0]!r}?" if found else "."
