"""The plugin that brings the examples' demonstrations; found by entry point, like a stranger's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl

if TYPE_CHECKING:
    from lightning.demos import Demo


@hookimpl
def register_demos(register: Callable[[str, Callable[[], Demo]], None]) -> None:
    """`lightning demo math`."""
    register("math", _math)


def _math() -> Demo:
    # Imported on use: it brings the openai client, which listing demos does not need.
    from lightning_examples.raw_python.demo import demo

    return demo()
