"""The keys of the configuration, each with its default, its help and the values that it accepts.

The invariant: everything is read from the models of the sections, so that errors and documentation always agree with these.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from lightning.config.plugin_settings import NamedSettings, config_model

PLAIN: Mapping[type, tuple[str, str]] = {
    bool: ("true or false", "values"),
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    str: ("a string", "strings"),
}
"""Types in words: a value, and several."""
NAME = "NAME"
"""Stands, in the keys of `settings`, for a name that the user gives (`NamedSettings`)."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One key, such as `trainer.steps`. `accepts` describes its values in words; `default` is written as TOML."""

    key: str
    accepts: str
    default: str
    help: str


def settings(model: type[BaseModel] | None = None, prefix: str = "") -> Iterator[Setting]:
    """Yield every setting in the order of the models, those of plugins behind the core's; the fields of an optional section
    come after the section itself."""
    model = config_model() if model is None else model
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        if section is None or (not field.is_required() and field.default is None):
            default = toml_value(field.get_default(call_default_factory=True))
            yield Setting(prefix + name, accepts(field), default, (field.description or "").strip())
        if section is not None:
            yield from settings(section, f"{prefix}{name}.")
    if issubclass(model, NamedSettings):
        yield from settings(model.each(), f"{prefix}{NAME}.")


def section_of(annotation: object) -> type[BaseModel] | None:
    """Return the model in a section's annotation (`X` or `X | None`), or None for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType):
        return next((found for part in get_args(annotation) if (found := section_of(part))), None)
    return None


def accepts(field: FieldInfo) -> str:
    """Return the values that a field takes, in words: `an integer >= 0`, `"cpu" or "cuda"`, `a list of strings, or null`."""
    text = _bounded(words(field.annotation), field.metadata)
    return f"{text.removesuffix(', or null')}, or null" if _optional(field.annotation) else text


def _bounded(text: str, metadata: Iterable[object]) -> str:
    for limit in metadata:
        for part in limit.metadata if isinstance(limit, FieldInfo) else (limit,):
            for name, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
                bound = getattr(part, name, None)
                if bound is not None:
                    text += f"{' and' if sign in text or '>' in text else ''} {sign} {bound:g}"
    return text


def find(key: str) -> FieldInfo | None:
    """Return the field of a dotted key; None for an unknown key. A name inside a free mapping gives the mapping's field. In a
    mapping of names to sections, and in `NamedSettings`, the key goes on with a field of the section after the name."""
    model: type[BaseModel] | None = config_model()
    field: FieldInfo | None = None
    names = key.split(".")
    for depth, name in enumerate(names):
        if model is None:
            inside = field is not None and get_origin(field.annotation) is dict and name
            if not inside or depth == len(names) - 1:
                return field if inside else None
            model = section_of(get_args(field.annotation)[1]) if field is not None else None
            if model is None:
                return None
            continue
        field = model.model_fields.get(name)
        if field is None and issubclass(model, NamedSettings):
            is_name = name and (depth < len(names) - 1 or name not in model.each().model_fields)
            field = FieldInfo(annotation=model.each()) if is_name else None
        if field is None:
            return None
        model = section_of(field.annotation)
    return field


def _optional(annotation: object) -> bool:
    return type(None) in get_args(annotation)


def words(annotation: object) -> str:
    """Return the values that a type takes, in words, such as `an integer`."""
    if isinstance(annotation, type) and annotation in PLAIN:
        return PLAIN[annotation][0]
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(f'"{part}"' for part in parts)
    if origin in (Union, types.UnionType):
        return " or ".join(words(part) for part in parts if part is not type(None))
    if annotation in (list, tuple):
        return "a list"
    if origin in (list, Sequence) or (origin is tuple and parts[-1] is Ellipsis):
        return f"a list of {_plural(parts[0])}"
    if origin is tuple:
        return f"a list of {len(parts)} {_plural(parts[0])}"
    if origin is dict:
        values = _plural(parts[1]) if len(parts) == 2 else "values"
        return f"a table of names and {values}"
    return "a table"


def _plural(annotation: object) -> str:
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        return _bounded(_plural(inner), metadata)
    if section_of(annotation) is not None:
        return "tables"
    single = float if set(get_args(annotation)) == {int, float} else annotation
    return PLAIN[single][1] if isinstance(single, type) and single in PLAIN else "values"


def toml_value(value: object) -> str:
    """Return a plain value as TOML text (`null`, which TOML lacks, for None)."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_toml_key(name)} = {toml_value(item)}' for name, item in value.items())}}}"
    return str(value)


def _toml_key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_value(name)
