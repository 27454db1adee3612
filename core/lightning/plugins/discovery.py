"""Finds the installed plugins (the entry points of the group `lightning`, read without importing anything they name), and keeps
the names that they register.

The invariant: each plugin has one name; a second distribution that claims it is reported, never silently preferred. A name that
a plugin registers means one thing: when two plugins claim it, asking for it is an error that names both.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import logging
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib.metadata import Distribution, EntryPoint
from typing import Literal, NamedTuple, TypeAlias

from lightning._version import __version__
from lightning.errors import PluginError
from lightning.installation import OWN, conflicts, install_command, upgrade_cure

logger = logging.getLogger(__name__)

GROUP = "lightning"
BRINGS = "lightning.brings"
"""The group of the entry points that say which plugin brings a name, whether the plugin is loaded or not."""
ANY = "any"
"""Stands for any name of a kind in the entry points of `BRINGS`."""
DISABLE = "LIGHTNING_DISABLE_PLUGINS"
"""A comma-separated list of plugins that are not to be loaded."""

State: TypeAlias = Literal["loaded", "waiting", "broken", "disabled"]


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """One plugin as found. `waits_for` is the module whose import loads the plugin (empty: it is loaded at once), `hooks` the
    hooks it implements, known once it is loaded, `error` why it is broken or disabled, and `cure` what mends it when it is
    broken."""

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
        """Return this info as that of a broken plugin, and log the `error`. An empty `cure` stands for an upgrade or a new
        installation."""
        if not cure and self.distribution == OWN:
            cure = f"install lightning again: {install_command()}"
        elif not cure:
            cure = f"{upgrade_cure(self.distribution)}, or pip uninstall it"
        said = "" if "pip install" in error else f". To mend it: {cure}"
        logger.warning("the plugin %s is broken with lightning %s: %s%s", self, __version__, error, said)
        return replace(self, state="broken", error=error, cure=cure)


def discover() -> tuple[dict[str, EntryPoint], dict[str, PluginInfo]]:
    """Return the entry points by plugin name, and the first info of every plugin. A broken or disabled plugin has no entry
    point."""
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
    if (OWN, __version__) not in origins.values():
        why = " ".join(f"{detail}. {cure}." for detail, cure in conflicts(__version__))
        logger.warning(
            "lightning's own plugins are missing: %s", why or f"it is not installed. Run: {install_command()}"
        )
    for name in sorted(disabled - infos.keys()):
        logger.warning("%s lists %r, which is not installed%s", DISABLE, name, near(name, infos))
    return entries, infos


def _origin(distribution: Distribution | None) -> tuple[str, str]:
    """Return name and version of a distribution. Reading each of them parses all of its metadata, which takes milliseconds."""
    if distribution is None:
        return "unknown", ""
    said = distribution.metadata
    return said["Name"], said["Version"]


def _unmet(entry: EntryPoint) -> str:
    """Return why this release of lightning does not meet what a stranger's distribution requires; "" if it does."""
    for text in (entry.dist.requires if entry.dist else None) or ():
        if re.match(rf"{OWN}(?![\w.-])", text, re.IGNORECASE):
            # imported only where a stranger's plugin is installed
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


def extra_of(kind: str, name: str) -> str:
    """Return the extra that brings a name of a kind, which has the name of its plugin; "" if no distribution says so."""
    named = {entry.value: entry.name for entry in importlib.metadata.entry_points(group=GROUP)}
    found = importlib.metadata.entry_points(group=BRINGS, name=f"{kind}.{name}")
    return next((named[entry.value] for entry in found if entry.value in named), "")


def near(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the known word nearest to `word`, or a full stop when nothing is near."""
    found = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {found[0]!r}?" if found else "."


def one(kind: str) -> str:
    """Return the singular of a kind of registered names, such as `algorithm` for `algorithms` (`register_algorithms`)."""
    return "group of operations" if kind == "operations" else kind.removesuffix("s").replace("_", " ")


class Registered(NamedTuple):
    """What a plugin registered under a name. A `usual` name is used where a user names none of its kind."""

    plugin: str
    factory: object
    usual: bool


class RegisteredNames:
    """The registered names: those that are `taken`, by kind, and the plugins that claim a `contested` one, by kind and name."""

    def __init__(self) -> None:
        self.taken: defaultdict[str, dict[str, Registered]] = defaultdict(dict)
        self.contested: dict[tuple[str, str], set[str]] = {}

    def take(self, kind: str, plugin: str, name: str, factory: object, *, usual: bool = False) -> None:
        """Register a name of a plugin.

        Raises `PluginError` when the name is taken, or is no name, or `factory` cannot be called. So it does for a credit
        function that is a class: credit functions are called with a group, not made by a factory.
        """
        if not isinstance(name, str) or not name or not callable(factory):
            raise PluginError(f"register_{kind} wants register(name, function), not register({name!r}, {factory!r})")
        if kind == "credits" and isinstance(factory, type):
            made = factory.__name__
            raise PluginError(
                f"register_credits wants the credit function itself, not its class {made}: register({name!r}, {made}())"
            )
        if name in self.taken[kind]:
            owner = self.taken[kind][name].plugin
            self.contested.setdefault((kind, name), set()).update({owner, plugin})
            raise PluginError(f"it registers the {one(kind)} {name!r}, which the plugin {owner!r} registers as well")
        self.taken[kind][name] = Registered(plugin, factory, usual)

    def drop(self, plugin: str) -> None:
        """Remove every name that a plugin registered. One that it claimed with another plugin stays contested."""
        for kind, names in self.taken.items():
            self.taken[kind] = {name: each for name, each in names.items() if each.plugin != plugin}
