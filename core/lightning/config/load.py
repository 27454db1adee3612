"""Reads the configuration from a TOML file, the environment and `--set`, where a later source wins over an earlier one.

The invariant: an unknown key, or a value that does not fit, is an error that names its source, the most similar key, and the
accepted values. Nothing is converted silently: `"3"` is not 3, and `true` is not 1.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from lightning.config.fields import NAME, accepts, find, section_of, settings, toml_value
from lightning.config.other_words import answer, did_you_mean
from lightning.config.plugin_settings import check_plugin_settings, config_model
from lightning.config.sections import Config
from lightning.errors import ConfigError
from lightning.plugins import plugins
from lightning.safe_text import read_text
from lightning.types import as_texts

ENV_PREFIX = "LIGHTNING_"
NOT_SETTINGS = ("LIGHTNING_DISABLE_PLUGINS", "LIGHTNING_TOKEN", "LIGHTNING_VLLM_SECRET")
"""Environment variables with the prefix that are no settings; other parts of lightning read them."""


@dataclass(frozen=True, slots=True)
class Given:
    """One given value with its dotted key and its source (`origin`, for messages)."""

    key: str
    value: object
    origin: str


def load_config(
    file: Path | None = None,
    overrides: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    base: Config | None = None,
) -> Config:
    """Return the configuration from `base`, `file` (TOML), `LIGHTNING_*` variables and `overrides` (`trainer.steps=3`), where a
    later source wins. None leaves a source out, but `env` of None is `os.environ`.

    A variable's name is `LIGHTNING_`, the section, two underscores, the field: `LIGHTNING_TRAINER__STEPS=3`. Values of
    variables and overrides are TOML; a bare word is a string, and `null` is None. Raises `ConfigError` for an unreadable file,
    for unknown keys, and for values that are not accepted; one error lists all of the keys, or all of the values.
    """
    given = list(_from_file(file)) if file is not None else []
    given += _from_env(os.environ if env is None else env)
    given += [_from_override(text) for text in as_texts(overrides, "overrides")]
    return _build(_set_in(base) if base else {}, given)


def with_settings(config: Config, settings: Mapping[str, object]) -> Config:
    """Return a copy with the values of dotted keys replaced, for example `{"trainer.steps": 30, "engine.lora": None}`.

    Raises `ConfigError` for an unknown key and a value that is not accepted.
    """
    return _build(_set_in(config), [Given(key, value, "settings") for key, value in settings.items()])


def _set_in(config: Config) -> dict[str, object]:
    """Return what is set in a configuration, also the settings of plugins in its sections, whatever class it has itself."""
    return config.model_dump(mode="json", exclude_unset=True, serialize_as_any=True)


def recorded_config(said: Mapping[str, object]) -> tuple[Config, list[str]]:
    """Return the configuration of a run's record, and the keys in it that this release does not have, which are left out. A
    setting that is not recorded has its default. Raises `ConfigError` for a value that this release does not accept."""
    tree = _copied(said)
    try:
        return config_model().model_validate(tree), []
    except ValidationError as error:
        places = [each["loc"] for each in error.errors() if each["type"] == "extra_forbidden"]
    for place in places:
        holder = tree
        for name in place[:-1]:
            holder = holder[name]
        del holder[place[-1]]
    try:
        return config_model().model_validate(tree), [".".join(map(str, place)) for place in places]
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(
            f"the recorded settings of the run are not this release's: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        ) from error


def _copied(value: Any) -> Any:
    return {name: _copied(item) for name, item in value.items()} if isinstance(value, Mapping) else value


def _build(base: dict[str, object], given: Sequence[Given]) -> Config:
    given = [part for item in given for part in _flatten(item)]
    problems = [problem for item in given if (problem := _unknown(item) or _not_plain(item))]
    if problems:
        raise ConfigError("\n".join(problems))
    for item in given:
        _place(base, item)
    try:
        # JSON mode: strict about types, yet a list is a tuple.
        config = config_model().model_validate_json(json.dumps(base), strict=True)
    except ValidationError as error:
        raise ConfigError("\n".join(dict.fromkeys(_wrong(detail, given) for detail in error.errors()))) from None
    check_plugin_settings(config)
    return config


def _from_file(file: Path) -> Iterator[Given]:
    try:
        tree = tomllib.loads(read_text(file, ConfigError))
    except OSError as error:
        raise ConfigError(f"the configuration file {file} cannot be read: {error.strerror or error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from error
    for name, value in tree.items():
        yield Given(name, value, str(file))


def _flatten(given: Given) -> Iterator[Given]:
    """Yield the single keys of a section's table, so that sources merge key by key. An empty table stays one value, since it
    turns an optional section such as `lora` on."""
    value = given.value.model_dump(mode="json") if isinstance(given.value, BaseModel) else given.value
    field = find(given.key)
    if isinstance(value, dict) and value and (field is None or section_of(field.annotation) is not None):
        for name, inner in value.items():
            yield from _flatten(Given(f"{given.key}.{name}", inner, given.origin))
    else:
        yield Given(given.key, value, given.origin)


def _from_env(env: Mapping[str, str]) -> Iterator[Given]:
    known = {ENV_PREFIX + setting.key.upper().replace(".", "__"): setting.key for setting in settings()}
    squeezed = {name.replace("__", "_"): name for name in known}
    for name, text in sorted(env.items()):
        if not name.startswith(ENV_PREFIX) or name in NOT_SETTINGS:
            continue
        if "__" in name:
            key = name.removeprefix(ENV_PREFIX).lower().replace("__", ".")
            origin = f"the environment variable {name}"
            yield Given(key, parse_value(text, origin), origin)
        elif name in squeezed:
            raise ConfigError(
                f"the environment variable {name} sets nothing: write {squeezed[name]} (two underscores after the section)"
            )


def _from_override(text: str) -> Given:
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"--set {text} is not a setting: write --set section.field=value, e.g. trainer.steps=3")
    origin = f"--set {text}"
    return Given(key.strip(), parse_value(value.strip(), origin), origin)


def parse_value(text: str, origin: str) -> object:
    """Return the value of a TOML text from the source `origin`. A text that is not TOML is taken as a string, unless it begins
    with a bracket or a quote: then `ConfigError` is raised. `null` is None."""
    if text == "null":
        return None
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError as error:
        if text[:1] in ("[", "{", '"', "'"):
            raise ConfigError(f"{origin}: {text} is not a TOML value: {error}") from error
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _unknown(given: Given) -> str:
    if find(given.key) is not None:
        return ""
    known = [setting.key for setting in settings()]
    spellings = _spellings(known, given.key)
    section, sections = given.key.partition(".")[0], config_model().model_fields
    if meant := _spelled(given.key, spellings):
        return f"{given.origin}: unknown setting {given.key!r}; did you mean {meant!r}?"
    if said := answer(given.key):
        return f"{given.origin}: unknown setting {given.key!r}: {said}"
    if brought := _brought(given.key):
        hint = f".{brought}"
    elif not (hint := did_you_mean(given.key, spellings)):
        inside = [key.partition(".")[2] for key in known if key.startswith(f"{section}.")]
        hint = f". [{section}] has: {', '.join(inside)}" if inside else f". Sections are: {', '.join(sections)}"
    left_out = "" if hint.startswith(";") else plugins().left_out("settings")
    return f"{given.origin}: unknown setting {given.key!r}{hint}{'.' if left_out and not brought else ''}{left_out}"


def _spellings(known: Sequence[str], given: str) -> list[str]:
    """Return the known keys; those with `NAME` come first, also with the name that the given key has in that place."""
    inside, names = [key.split(".") for key in known if NAME in key.split(".")], given.split(".")
    own = [
        [*parts[:place], names[place], *parts[place + 1 :]]
        for parts in inside
        if (place := parts.index(NAME)) + 1 < len(names)
    ]
    return [*map(".".join, own), *map(".".join, inside), *(key for key in known if NAME not in key.split("."))]


def _spelled(key: str, known: Sequence[str]) -> str:
    """Return the setting whose section the key misspells and whose name it has; "" if there is none."""
    section, _, name = key.rpartition(".")
    sections = {*known, *(each.rpartition(".")[0] for each in known)}
    near = (f"{each}.{name}" for each in get_close_matches(section, sections, 3, 0.75))
    return next((each for each in near if find(each) is not None), "")


def _brought(key: str) -> str:
    """Say which plugin brings a setting; "" if it is here, or if none is known to have it."""
    names = key.split(".")
    places = (".".join(names[:depth]) for depth in range(1, len(names) + 1))
    return plugins().brought("settings", next((place for place in places if find(place) is None), ""))


def _not_plain(given: Given) -> str:
    """Return the error message for a value that JSON cannot hold (a TOML date, a Python object), which fits no setting; else
    ""."""
    try:
        json.dumps(given.value)
    except (TypeError, ValueError):
        return _cannot_be(given.origin, given.key, given.value)
    return ""


def _place(tree: dict[str, object], given: Given) -> None:
    *parents, last = given.key.split(".")
    for name in parents:
        below = tree.get(name)
        if not isinstance(below, dict):
            below = tree[name] = {}
        tree = below
    field = find(given.key)
    turns_on = given.value == {} and field is not None and section_of(field.annotation) is not None
    if not turns_on or not isinstance(tree.get(last), dict):
        tree[last] = given.value


def _wrong(detail: ErrorDetails, given: Sequence[Given]) -> str:
    """Return one of pydantic's errors as our message: the value's source, the key, the value, and the accepted values."""
    path = [str(part) for part in detail["loc"]]
    while len(path) > 1 and find(".".join(path)) is None:
        path.pop()  # an index in a list, or the branch of a union
    key = ".".join(path)
    near = [item for item in given if item.key == key or f"{key}.".startswith(f"{item.key}.")]
    if not near:
        return f"{key}: {detail['msg']}"
    return _cannot_be(near[-1].origin, key, near[-1].value if near[-1].key == key else detail["input"])


def _cannot_be(origin: str, key: str, value: object) -> str:
    field = find(key)
    return f"{origin}: {key} cannot be {toml_value(value)}; it accepts {accepts(field) if field else 'nothing'}"
