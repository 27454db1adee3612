"""Checks of the arguments that a user gives to an algorithm, a loss, a credit or a trainer.

The invariant: what a class does not take is a `ConfigError` that names the argument and the right word, never a bare
`TypeError`.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, TypeVar

from lightning.config.fields import settings
from lightning.config.other_words import WORDS, unknown_argument
from lightning.errors import ConfigError

Kind = TypeVar("Kind", bound=type[Any])


def _own_word(what: str, name: str, known: Sequence[str]) -> str:
    """Return the message for a word whose answer is an argument of LightningRL that the class `what` takes as well; else ""."""
    word = WORDS.get(name)
    given = (
        re.findall(r"[(\s](\w+)=", word.answer) if word is not None and word.answer.startswith("LightningRL(") else []
    )
    if word is None or not given or not all(each in known for each in given) or what == "LightningRL":
        return ""
    here = f"{what}{word.answer.removeprefix('LightningRL')}"
    return f"{what} has no argument {name!r}: `{name}` is {word.whose}'s word for {word.meaning}. Here: `{here}`"


def refuses_unknown(kind: Kind) -> Kind:
    """Make a class refuse what it does not take with a `ConfigError`: an argument of another name, whose right word it says,
    also a setting; too many or too few of them; and what is no number where one is wanted. A whole number may be
    given as 4.0."""
    init: Callable[..., None] = kind.__init__
    signature = inspect.signature(init)
    known = [name for name in signature.parameters if name != "self"]

    @functools.wraps(init)
    def checked(self: object, *args: object, **given: object) -> None:
        if unknown := [name for name in given if name not in known]:
            names = [*known, *(setting.key for setting in settings())]
            what, takes = kind.__name__, ", ".join(known)
            told = [_own_word(what, name, known) or unknown_argument(what, name, names, takes) for name in unknown]
            raise ConfigError("\n".join(told))
        try:
            bound = signature.bind(self, *args, **given)
        except TypeError as error:
            raise ConfigError(f"{kind.__name__}: {error}. It takes: {', '.join(known)}") from None
        for name, value in bound.arguments.items():
            if wanted := _no_number(signature.parameters[name], value):
                raise ConfigError(f"{kind.__name__}: {name} cannot be {value!r}; it accepts {wanted}")
            if isinstance(value, Real) and _wanted(signature.parameters[name])[0] == "int":
                bound.arguments[name] = int(value)  # type: ignore[call-overload]  # range() takes no 4.0
        init(*bound.args, **bound.kwargs)

    kind.__init__ = checked
    return kind


def _no_number(parameter: inspect.Parameter, value: object) -> str:
    """Return what an argument that is a number accepts, or "" if it accepts the value or is no number."""
    wanted, optional = _wanted(parameter)
    if wanted not in ("int", "float") or (value is None and (optional == "None" or parameter.default is None)):
        return ""
    if isinstance(value, Real) and (wanted == "float" or float(value).is_integer()):
        return ""
    return ("a number" if wanted == "float" else "a whole number") + (", or None" if optional else "")


def _wanted(parameter: inspect.Parameter) -> tuple[str, str]:
    """Return the first type of an argument's annotation, and the others."""
    wanted, _, optional = str(parameter.annotation).partition(" | ")
    return wanted, optional


def refuse_class(given: object, what: str) -> None:
    """Raise `ConfigError` for a class in place of an object of it, which `what` is, such as a credit."""
    if isinstance(given, type):
        raise ConfigError(f"{what} is the class {given.__name__}, not an object of it: give {given.__name__}(...)")
