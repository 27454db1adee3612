"""The settings that plugins add: tables of their own, such as `engine.verl`, and further keys of a section.

The invariant: a plugin's settings are read, checked and documented as the core's own are. Without the plugin its keys are
unknown, so that none is ever set without effect; two plugins, or a plugin and the core, never share a key.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, Self, cast, get_args, get_type_hints

from pydantic import ConfigDict, create_model

from lightning.config import sections
from lightning.config.sections import Section
from lightning.errors import PluginError
from lightning.plugins import DISABLE, plugins


class PluginSettings(Section):
    """Settings of a plugin, which registers the class with `register_settings`.

    `place` is where they stand: `engine.verl` makes them a table of that name in the section `engine`, `notes` makes them a
    section, and the name of a section of the core, such as `runner`, adds them to it as further keys. A class that is also
    derived from that of a table of the core, such as `gateway.limits`, stands in for it.
    """

    place: ClassVar[str]
    of_training_state: ClassVar[Collection[str]] = ()
    """Keys that say how an engine stores its training state, which is not loaded with other values of them."""
    of_run: ClassVar[Collection[str]] = ()
    """Keys that stay as they were recorded when a run is resumed, because its calls were answered under them."""

    @classmethod
    def of(cls, config: Section) -> Self:
        """Return these settings of a configuration, or of its section to which `place` belongs; the defaults if it was made
        without them, as `Config()` is."""
        names = cls.place.split(".")
        found: object = config
        for name in names if isinstance(config, sections.Config) else names[1:]:
            found = getattr(found, name, None)
        return found if isinstance(found, cls) else cls()

    def check(self) -> None:
        """Raise `ConfigError` for values that cannot go together. Called wherever settings are loaded or changed."""


class NamedSettings(PluginSettings):
    """A table whose keys are names that the user gives, each with a table of its own: `[notes.mine]`.

    A subclass says which: `__pydantic_extra__: dict[str, Note] = Field(init=False)`, with `Note` a `Section`. A key of that
    table is no name, so that `notes.size` is an unknown setting.
    """

    model_config = ConfigDict(extra="allow")

    @property
    def by_name(self) -> Mapping[str, Any]:
        """The tables by their names, in the order in which they are set."""
        return self.model_extra or {}

    @classmethod
    def each(cls) -> type[Section]:
        """Return the class of the table of a name."""
        return cast("type[Section]", get_args(get_type_hints(cls)["__pydantic_extra__"])[1])


Registered = tuple[tuple[str, Callable[[], type[PluginSettings]]], ...]


def config_model() -> type[sections.Config]:
    """Return the class of configurations with the settings of all plugins. Raises `PluginError` for settings that cannot be
    made, and for a key that two plugins, or a plugin and the core, have."""
    return _with_plugins(_registered())[0]


def check_plugin_settings(config: sections.Config) -> None:
    """Raise `ConfigError` for settings of a plugin that cannot go together."""
    for kind in _with_plugins(_registered())[1]:
        kind.check(kind.of(config))


def keys_of_training_state() -> list[str]:
    """The keys of plugins with which a training state is stored, and without which it is not loaded, with `*` for a name that
    the user gives."""
    return _keys(lambda kind: kind.of_training_state)


def keys_of_run() -> list[str]:
    """The keys of plugins that stay the same in a run, with `*` for a name that the user gives."""
    return _keys(lambda kind: kind.of_run)


def _keys(of: Callable[[type[PluginSettings]], Collection[str]]) -> list[str]:
    kinds = _with_plugins(_registered())[1]
    return [
        f"{kind.place}.*.{key}" if issubclass(kind, NamedSettings) else f"{kind.place}.{key}"
        for kind in kinds
        for key in of(kind)
    ]


def _registered() -> Registered:
    names = plugins().names("settings")
    return tuple((name, cast("Any", plugins().get("settings", name))) for name in names)


@functools.cache
def _with_plugins(registered: Registered) -> tuple[type[sections.Config], list[type[PluginSettings]]]:
    """Make the class of configurations, in which each section is a subclass of the core's, and return it with the classes that
    plugins registered."""
    found: list[type[PluginSettings]] = []
    owners = {f"{section}.{key}": "" for section, kind in _sections().items() for key in kind.model_fields}
    bases: dict[str, list[type[Section]]] = {section: [kind] for section, kind in _sections().items()}
    tables: dict[str, dict[str, Any]] = {section: {} for section in ("", *bases)}
    for name, factory in registered:
        found.append(kind := _made(name, factory))
        section, _, table = kind.place.rpartition(".")
        if section not in tables:
            raise PluginError(
                f"the settings {name!r} of the plugin {plugins().owner('settings', name)} belong to the section {section!r}, "
                f"and there is none: sections are {', '.join(bases)}"
            )
        keys = [f"{kind.place}.{key}" for key in kind.model_fields] if kind.place in bases else [kind.place]
        of_core = _sections()[section].model_fields.get(table) if section else None
        if of_core is not None and issubclass(kind, type(of_core.default)) and not owners[kind.place]:
            del owners[kind.place]  # it stands in for this table
        for key in keys:
            if (other := owners.setdefault(key, name)) != name:
                raise PluginError(_taken(key, name, other))
        if kind.place in bases:
            bases[kind.place].insert(0, kind)
        else:
            tables[section][table] = (kind, kind())
    for section, kinds in bases.items():
        name, said = kinds[-1].__name__, kinds[-1].__doc__
        made = create_model(name, __base__=tuple(kinds), __doc__=said, __module__=__name__, **tables[section])
        tables[""][section] = (made, made())
    said = sections.Config.__doc__
    return create_model("Config", __base__=sections.Config, __doc__=said, __module__=__name__, **tables[""]), found


def _sections() -> dict[str, type[Section]]:
    """Return the core's own sections by name."""
    return {name: cast("type[Section]", field.annotation) for name, field in sections.Config.model_fields.items()}


def _made(name: str, factory: Callable[[], object]) -> type[PluginSettings]:
    """Return the class that a plugin registered. Raises `PluginError` for what is none, with the plugin's name."""
    owner = plugins().owner("settings", name)
    try:
        kind = factory()
        if isinstance(kind, type) and issubclass(kind, PluginSettings) and kind.place:
            kind()
            return kind
        said = f"are {kind!r}: register a function that returns a class with a `place`, derived from PluginSettings"
    except Exception as error:
        said = f"cannot be made ({type(error).__name__}: {error}). Mend the plugin, or start without it"
        raise PluginError(f"the settings {name!r} of the plugin {owner} {said}: {DISABLE}={owner.name}") from error
    raise PluginError(f"the settings {name!r} of the plugin {owner} {said}")


def _taken(key: str, name: str, other: str) -> str:
    """Return the message for a key that settings of this name bring, and others of the name `other` (of the core if empty)."""
    first = f"the plugin {plugins().owner('settings', other)}" if other else "the core"
    return (
        f"{first} and the plugin {plugins().owner('settings', name)} both have the setting {key}: set {DISABLE} to one of "
        "them that is a plugin, or uninstall it"
    )


def __getattr__(name: str) -> type[Section]:
    """Find the class of a section, or of configurations, under its name, as `pickle` does in another process."""
    if name == "Config":
        return config_model()
    for section, kind in _sections().items():
        if kind.__name__ == name:
            return cast("type[Section]", config_model().model_fields[section].annotation)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
