"""The plugin that brings the examples' demonstrations; found by entry point, like a stranger's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, cast

from lightning.errors import MissingExtraError
from lightning.hooks import hookimpl

if TYPE_CHECKING:
    from lightning.demos import Demo

FOLDERS = {
    "calculator": "calculator_autogen",
    "quest": "quest_python",
    "tiny": "raw_python",
    "sql": "sql_langchain",
    "rag": "rag_openai_agents",
    "math": "math_autogen",
    "opposites": "opposites",
}
"""The folder of each demonstration."""


@hookimpl
def register_demos(register: Callable[[str, Callable[[], Demo]], None]) -> None:
    """`lightning demo calculator`, `quest`, `tiny`, `sql`, `rag`, `math` and `opposites`."""
    for name, folder in FOLDERS.items():
        register(name, partial(_demo, folder))


def _demo(folder: str) -> Demo:
    # Imported on use: it brings the example's framework, which listing demos does not need.
    try:
        module = import_module(f"lightning_examples.{folder}.demo")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("lightning"):
            raise
        raise MissingExtraError("examples", error.name or "") from error
    return cast("Demo", module.demo())
