"""What an exception is, without importing the framework that raised it."""

from __future__ import annotations

from collections.abc import Mapping


def by_type(error: BaseException, table: Mapping[str, str]) -> str | None:
    """The table's word for the type of an error, or for the nearest type that it is derived from; None where it has none.

    Types are written as the package and the class: `openai.LengthFinishReasonError`, whichever module of the package has it.
    """
    names = (f"{each.__module__.partition('.')[0]}.{each.__name__}" for each in type(error).__mro__)
    return next((table[name] for name in names if name in table), None)
