"""Limits on concurrent runs of a tool (`runner.tool_limits`): runs wait for a slot, if a plugin's stage has set slots.

The invariant: without such a stage no run waits, and no method of a framework is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from typing import Any, Protocol


class ToolSlot(AbstractContextManager[object], AbstractAsyncContextManager[object], Protocol):
    """The slot of one run of a tool: entering waits until it is free. Also a slot entered by `async with` may be left by
    `__exit__`."""


class ToolSlots(Protocol):
    """The slots of all tools, set by a plugin's stage."""

    def slot(self, name: str) -> ToolSlot:
        """Return the slot for a run of this tool."""

    def hold(self, module: str, owner: str, methods: Iterable[str], name_of: Callable[..., str]) -> Callable[[], None]:
        """Make a framework's methods wait for a slot, as `hold_slots` says; return the undo."""


_slots: ToolSlots | None = None


def set_slots(slots: ToolSlots) -> Callable[[], None]:
    """Make runs of tools wait for these slots from now on; return the undo. Must be called before adapters are installed."""
    global _slots
    before, _slots = _slots, slots

    def undo() -> None:
        global _slots
        _slots = before

    return undo


def tool_slot(name: str) -> ToolSlot:
    """Return the slot for a run of this tool, to be held while it runs: `with tool_slot(name):`, or `async with`. Without slots
    it does nothing."""
    return nullcontext() if _slots is None else _slots.slot(name)


def _own_name(tool: Any, *_: Any, **__: Any) -> str:
    return str(tool.name)


def hold_slots(
    module: str, owner: str, methods: Iterable[str], name_of: Callable[..., str] = _own_name
) -> Callable[[], None]:
    """Make the methods of a framework that run its tools wait for a slot; return the undo. For adapters.

    `owner` is the class in `module`, or empty for functions of the module. `name_of` gets a call's arguments and returns the
    name of the tool: by default the attribute `name` of the first argument. Without slots nothing is replaced.
    """
    return (lambda: None) if _slots is None else _slots.hold(module, owner, methods, name_of)
