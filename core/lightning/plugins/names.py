"""What plugins registered: a factory for each name of each kind; a credit function for each name of a credit.

The invariant: a name means one thing. When two plugins claim it, asking for it is an error that names both.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from lightning.errors import PluginError

Kind: TypeAlias = Literal[
    "algorithms", "credits", "engines", "stores", "keepers", "runners", "trackers", "commands", "checks", "demos"
]
KINDS: tuple[Kind, ...] = get_args(Kind)


def one(kind: Kind) -> str:
    """The kind in the singular."""
    return kind.removesuffix("s")


class RegisteredNames:
    """The names of all kinds, each with the plugin that gave it."""

    def __init__(self) -> None:
        self._taken: dict[Kind, dict[str, tuple[str, object]]] = {kind: {} for kind in KINDS}
        self._contested: dict[tuple[Kind, str], set[str]] = {}

    def take(self, kind: Kind, plugin: str, name: str, factory: object) -> None:
        """Register a name.

        Raises `PluginError` when it is taken, or not a name, or what it stands for cannot be called; a credit function that is
        a class, because credit functions are no factories: what is registered is called with a group.
        """
        if not isinstance(name, str) or not name or not callable(factory):
            raise PluginError(f"register_{kind} wants register(name, function), not register({name!r}, {factory!r})")
        if kind == "credits" and isinstance(factory, type):
            made = factory.__name__
            raise PluginError(
                f"register_credits wants the credit function itself, not its class {made}: register({name!r}, {made}())"
            )
        if name in self._taken[kind]:
            owner = self._taken[kind][name][0]
            self._contested.setdefault((kind, name), set()).update({owner, plugin})
            raise PluginError(f"it registers the {one(kind)} {name!r}, which the plugin {owner!r} registers as well")
        self._taken[kind][name] = (plugin, factory)

    def known(self, kind: Kind) -> list[str]:
        """The names of a kind, sorted."""
        return sorted(self._taken[kind])

    def claimants(self, kind: Kind, name: str) -> list[str]:
        """The plugins that quarrel about a name; empty when none do."""
        return sorted(self._contested.get((kind, name), ()))

    def find(self, kind: Kind, name: str) -> object | None:
        """What a name stands for, or None."""
        found = self._taken[kind].get(name)
        return None if found is None else found[1]

    def drop(self, plugin: str) -> None:
        """Forget everything a plugin registered; its quarrels are remembered."""
        for names in self._taken.values():
            for name in [name for name, (owner, _) in names.items() if owner == plugin]:
                del names[name]
