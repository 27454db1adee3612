"""Algorithms written as text: `grpo:group_size=8,kl_coefficient=0.01`, or several in turn: `sft:2,grpo:20`.

The invariant: a text always means the same list of phases, whichever algorithms are registered. An argument that an algorithm
does not take is refused before the algorithm is made.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter, ValidationError

from lightning.config.fields import toml_value, words
from lightning.config.load import parse_value
from lightning.config.other_words import unknown_argument
from lightning.errors import ConfigError
from lightning.plugins import plugins
from lightning.plugins.named import import_named

if TYPE_CHECKING:
    from lightning.algorithms.protocol import Algorithm, SearchAlgorithm

STRICT = ConfigDict(strict=True, extra="forbid")
FORM = "write NAME, NAME:STEPS, NAME:key=value,key=value or NAME:STEPS:key=value, several with commas between"


@dataclass(frozen=True, slots=True)
class Phase:
    """One algorithm of a text: its registered name, its arguments, and the number of steps that it trains (None: to the
    end)."""

    name: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    steps: int | None = None


def parse_algorithms(text: str) -> list[Phase]:
    """Return the phases that a text names, in order; at least one. The names need not be registered.

    `text` is a list with commas. A part NAME, NAME:STEPS, NAME:key=value or NAME:STEPS:key=value begins a phase; a part
    key=value is a further argument of the phase before it. Values are TOML; a bare word is a string, and `null` is None.
    A dotted key is a field of an argument that has fields itself. Raises `ConfigError`, naming the part, for anything else.
    """
    phases: list[tuple[str, dict[str, object], int | None]] = []
    for part in _split(text):
        head, equals, value = part.partition("=")
        if not equals or ":" in head:
            name, steps, head = _begun(text, part, head, bool(equals))
            phases.append((name, {}, steps))
        elif not phases:
            raise _wrong(text, f"the argument {part} belongs to no algorithm")
        if equals:
            _place(text, phases[-1][1], head.strip(), parse_value(value.strip(), f"the algorithm {text!r}"))
    return [Phase(*phase) for phase in phases]


def make_algorithm(phase: Phase) -> Algorithm | SearchAlgorithm:
    """Make the registered algorithm of a phase with its arguments.

    Raises `PluginError` for an unknown name. Raises `ConfigError` for an argument that the algorithm does not take, with a list
    of its arguments; for a value of a wrong type; and for a value that the algorithm itself refuses.
    """
    factory = plugins().algorithm(phase.name)
    return factory(**_fitting(factory, phase.name, phase.arguments)) if phase.arguments else factory()


def _split(text: str) -> Iterator[str]:
    """Yield the parts of a text between commas; commas inside quotes or brackets do not separate."""
    depth, quote, start, escaped = 0, "", 0, False
    for place, letter in enumerate(text):
        if quote:
            if letter == quote and not escaped:
                quote = ""
            escaped = letter == "\\" and quote == '"' and not escaped
        elif letter in "\"'":
            quote = letter
        elif letter in "[{":
            depth += 1
        elif letter in "]}":
            depth -= 1
        elif letter == "," and not depth:
            yield _filled(text, text[start:place])
            start = place + 1
    yield _filled(text, text[start:])


def _filled(text: str, part: str) -> str:
    if not part.strip():
        raise _wrong(text, "a part of it is empty")
    return part.strip()


def _begun(text: str, part: str, head: str, has_argument: bool) -> tuple[str, int | None, str]:
    """Return the name, the steps (None if not given) and the first argument's key ("" if none) of a part that begins a
    phase."""
    name, *rest = (word.strip() for word in head.split(":"))
    key = rest.pop() if has_argument else ""
    if not name or any(letter.isspace() for letter in name) or len(rest) > 1:
        raise _wrong(text, f"{part} is no algorithm")
    if not rest:
        return name, None, key
    if not (rest[0].isascii() and rest[0].isdigit() and int(rest[0])):
        raise _wrong(text, f"in {part}, {rest[0]!r} is neither a number of steps, 1 or more, nor an argument key=value")
    return name, int(rest[0]), key


def _place(text: str, arguments: dict[str, object], key: str, value: object) -> None:
    """Set a value in `arguments` at its dotted key. Raises `ConfigError` if the key is set already or is not well formed."""
    *outer, last = key.split(".")
    if not all((*outer, last)):
        raise _wrong(text, f"{key!r} is no name of an argument")
    for name in outer:
        inner = arguments.setdefault(name, {})
        if not isinstance(inner, dict):
            raise _wrong(text, f"{name} is given as a whole and as {key}")
        arguments = inner
    if last in arguments:
        raise _wrong(text, f"{key} is given twice")
    arguments[last] = value


def _wrong(text: str, problem: str) -> ConfigError:
    return ConfigError(f"the algorithm {text!r}: {problem}; {FORM}")


@dataclass(frozen=True, slots=True)
class _Argument:
    """An argument of a factory. `kinds` are its types whose values can be written in a text, `optional` says whether None is
    allowed, and `objects` whether it also takes objects such as functions, which a text can only name (MODULE:NAME)."""

    kinds: tuple[object, ...]
    optional: bool
    objects: bool

    @property
    def text(self) -> str:
        named = ["MODULE:NAME of an object"] if self.objects else []
        return " or ".join([words(Union[self.kinds]), *named] if self.kinds else named)  # noqa: UP007 — of a tuple


def _fitting(factory: Callable[..., object], what: str, given: Mapping[str, object]) -> dict[str, object]:
    """Return the given arguments converted to the types of the factory's parameters. Raises `ConfigError`, beginning with
    `what`, for an unknown argument and for a value of no fitting type."""
    known, any_name = _arguments(factory)
    found = {}
    for name, value in given.items():
        if name not in known:
            if any_name:
                found[name] = value
                continue
            takes = ", ".join(f"{key} ({argument.text})" for key, argument in known.items()) or "no argument"
            raise ConfigError(unknown_argument(what, name, known, takes))
        argument = known[name]
        if value is None and argument.optional:
            found[name] = None
            continue
        if argument.objects and isinstance(value, str) and ":" in value:
            found[name] = import_named(value, name)
            continue
        fits = [made for kind in argument.kinds for made in _as(kind, value, f"{what}: {name}")]
        if not fits:
            raise ConfigError(f"{what}: {name} cannot be {toml_value(value)}; it accepts {argument.text}")
        found[name] = fits[0]
    return found


def _arguments(factory: Callable[..., object]) -> tuple[dict[str, _Argument], bool]:
    """Return the arguments that a factory takes by name, and whether it also takes any other name (`**kwargs`)."""
    hints = types_of(factory.func if isinstance(factory, partial) else factory)
    known: dict[str, _Argument] = {}
    any_name = False
    for name, parameter in inspect.signature(factory).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            any_name = True
        elif parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            default = None if parameter.default is parameter.empty else parameter.default
            hint = hints.get(name, object)
            kinds = _by_default(default) if hint in (object, Any) else tuple(_sayable(hint))
            known[name] = _Argument(kinds, default is None or type(None) in get_args(hint), _takes_objects(hint))
    return known, any_name


def types_of(factory: Callable[..., object]) -> dict[str, object]:
    """Return the annotated types of a class's fields (base classes included) or of a function's parameters. A class or function
    with a type that is imported only for type checkers is left out whole."""
    found: dict[str, object] = {}
    for holder in reversed(factory.__mro__) if isinstance(factory, type) else (factory,):
        with suppress(NameError, TypeError):
            found |= inspect.get_annotations(holder, eval_str=True)
    return found


def _by_default(default: object) -> tuple[object, ...]:
    """Return the types of an argument without an annotation, derived from its default."""
    plain = (bool, int, float, str, list, tuple, dict)
    if type(default) is int:  # a default such as 1 does not exclude 0.5
        return (int, float)
    return (type(default),) if type(default) in plain else plain


def _sayable(hint: object) -> Iterator[object]:
    """Yield the parts of a type (of a union, its members) whose values can be written in a text."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        for part in get_args(hint):
            yield from _sayable(part)
    elif (
        hint in (bool, int, float, str, list, tuple, dict)
        or origin is Literal
        or (isinstance(origin, type) and issubclass(origin, (Sequence, Mapping)))
        or (isinstance(hint, type) and dataclasses.is_dataclass(hint))
    ):
        yield hint


def _takes_objects(hint: object) -> bool:
    """Whether a type has a part whose values cannot be written in a text, such as a function."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return hint not in (object, Any) and any(part is not type(None) and not [*_sayable(part)] for part in parts)


def _as(kind: Any, value: object, where: str) -> Iterator[object]:
    """Yield the value converted to the type `kind`, or nothing if it does not fit. A list also fits a tuple, and an integer a
    float."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if isinstance(value, dict):
            yield kind(**_fitting(kind, where, value))
        return
    with suppress(
        ValidationError, TypeError
    ):  # a value that JSON cannot hold, such as a date, fits no type that an algorithm takes
        yield TypeAdapter(kind, config=STRICT).validate_json(json.dumps(value))
