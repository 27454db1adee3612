"""What a user calls a module of a DSPy program: the attribute that holds it, else its signature or its class.

The invariant: a name has no slash, which separates the names of a path.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from dspy import Module
from dspy.primitives.base_module import BaseModule

UNNAMED_SIGNATURE = "StringSignature"
"""What DSPy calls a signature that is written as a text, `question -> answer`."""
NO_PARTS = ("history", "callbacks", "demos", "traces", "train")
"""Attributes of modules in which DSPy keeps what it has seen."""


def name_of(module: Module, around: Sequence[object], *, part: bool) -> str:
    """The name of a module that is called inside others, given from the innermost; empty where it has none.

    A program has none: its parts have. Nor has a `part` of one of DSPy's own modules, such as the predictor in a
    `ChainOfThought`; a module that is called by a tool is no part.
    """
    for program in around:
        for name, held in _parts(program):
            if held is module:
                return name
    if part and _is_dspys(around[0]):
        return ""
    return own_name(module) if _is_dspys(module) else ""


def own_name(module: object) -> str:
    """What a module is called by itself."""
    kind = type(module)
    if not kind.__module__.startswith("dspy."):
        return kind.__name__
    name = str(getattr(getattr(module, "signature", None), "__name__", UNNAMED_SIGNATURE))
    return kind.__name__ if name == UNNAMED_SIGNATURE else name


def _is_dspys(module: object) -> bool:
    """Whether a module is one of those that DSPy brings, or derived from one: it calls its parts as DSPy does."""
    kinds = [kind for kind in type(module).__mro__ if kind not in (Module, BaseModule)]
    return any(kind.__module__.startswith("dspy.") for kind in kinds)


def _parts(program: object) -> Iterator[tuple[str, object]]:
    """The modules that a user's program holds: `writer`, `writers.0`, `writers.draft`."""
    if _is_dspys(program):
        return
    for name, value in list(vars(program).items()):
        if name in NO_PARTS:
            continue
        if isinstance(value, list | tuple):
            items: Iterable[tuple[object, object]] = enumerate(value)
        else:
            items = list(value.items()) if isinstance(value, dict) else ()
            yield name, value
        for key, item in items:
            yield f"{name}.{key}".replace("/", "."), item
