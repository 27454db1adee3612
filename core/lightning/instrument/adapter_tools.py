"""What adapters need of a framework: whether its version is one that they were made for, what an exception of it is, and a
method of it replaced where it has no hook.

The invariant: nothing of the framework is imported here, and what was replaced can be put back.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Mapping
from types import ModuleType

from lightning.errors import PluginError


def check_supported(supported: Mapping[str, tuple[str, str]]) -> None:
    """Raise `PluginError`, with the command that cures it, for an installed distribution outside its range.

    `supported` is distribution -> (first version that works, first that is not known to), such as `("1.2", "2")`. Only the
    numbers of a release count: `2.0rc1` is 2.0. What is not installed, or has no metadata, is not checked.
    """
    for distribution, (low, high) in supported.items():
        try:
            installed = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        if not _numbers(low) <= _numbers(installed) < _numbers(high):
            wanted = f"{distribution}>={low},<{high}"
            raise PluginError(
                f"{distribution} {installed} is installed, but this adapter works with {wanted}. "
                f"Run: pip install '{wanted}'"
            )


def _numbers(version: str) -> tuple[int, ...]:
    """`1.10.0rc1` as (1, 10); zeros at the end do not count, so that 2 equals 2.0."""
    release = re.match(r"(?:\d+!)?v?(\d+(?:\.\d+)*)", version)
    numbers = [int(part) for part in release[1].split(".")] if release else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def by_type(error: BaseException, table: Mapping[str, str]) -> str | None:
    """The table's word for the type of an error, or for the nearest type that it is derived from; None where it has none.

    Types are written as the package and the class: `openai.LengthFinishReasonError`, whichever module of the package has it.
    """
    names = (f"{each.__module__.partition('.')[0]}.{each.__name__}" for each in type(error).__mro__)
    return next((table[name] for name in names if name in table), None)


def replace_method(
    owner: type | ModuleType, name: str, wrap: Callable[..., Callable[..., object]]
) -> Callable[[], None]:
    """Put `wrap(the method)` in the place of a class's method, or of a module's function; returns the undo.

    A method is given as its class binds it: what another library has put there may need that to find its instance.
    """
    inherited, original = name not in vars(owner), vars(owner).get(name)
    ours = wrap(getattr(owner, name))
    setattr(owner, name, ours)

    def undo() -> None:
        if vars(owner)[name] is not ours:
            return  # somebody else stands before it now
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)

    return undo
