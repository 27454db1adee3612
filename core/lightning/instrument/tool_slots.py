"""Where the runs of tools wait for their turn, in whatever a plugin's stage puts here (`runner.tool_limits`).

The invariant: without such a stage nobody waits, and nothing of a framework is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from types import TracebackType
from typing import Any, Protocol


class ToolSlot(Protocol):
    """The turn of one run of a tool: entering it waits. What was entered either way may be left by `__exit__`."""

    def __enter__(self) -> object: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...
    async def __aenter__(self) -> object: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...


class ToolSlots(Protocol):
    """What a stage has the runs of tools wait for."""

    def slot(self, name: str) -> ToolSlot:
        """The turn of a run of this tool."""

    def hold(self, module: str, owner: str, methods: Iterable[str], name_of: Callable[..., str]) -> Callable[[], None]:
        """See `hold_slots`."""


_slots: ToolSlots | None = None


def set_slots(slots: ToolSlots) -> Callable[[], None]:
    """Have runs of tools wait for these from now on; returns the undo. Adapters are installed after it."""
    global _slots
    before, _slots = _slots, slots

    def undo() -> None:
        global _slots
        _slots = before

    return undo


def tool_slot(name: str) -> ToolSlot:
    """The turn of a run of this tool, which waits for it and has it in the block: `with tool_slot(name):`, or `async with`."""
    return nullcontext() if _slots is None else _slots.slot(name)


def _own_name(tool: Any, *_: Any, **__: Any) -> str:
    return str(tool.name)


def hold_slots(
    module: str, owner: str, methods: Iterable[str], name_of: Callable[..., str] = _own_name
) -> Callable[[], None]:
    """Have the methods of a framework that run its tools wait for a slot; returns the undo. For adapters.

    `owner` is the class in `module`, or empty for functions of the module. `name_of` gets a call's arguments and says which
    tool it runs: by default its first one, by its `name`. Nothing is replaced where no tool waits.
    """
    return (lambda: None) if _slots is None else _slots.hold(module, owner, methods, name_of)
