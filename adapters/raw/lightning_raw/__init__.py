"""Adapter for agents in plain Python: names the caller by `lightning.component`, else by the functions on the stack.

The invariant: it only looks, it never changes what the agent does; and it answers last, so a framework's adapter wins.
"""

from __future__ import annotations

from collections.abc import Callable

import lightning
from lightning.instrument import component_path

from lightning_raw.frames import user_functions

__all__ = ["lightning_identify", "lightning_install"]

_installed: list[object] = []


@lightning.hookimpl
def lightning_install() -> Callable[[], None]:
    """Begin to answer `lightning_identify`. There is nothing to attach to: `@lightning.tool` reports its own runs."""
    ticket = object()
    _installed.append(ticket)

    def undo() -> None:
        if ticket in _installed:
            _installed.remove(ticket)

    return undo


@lightning.hookimpl(trylast=True)
def lightning_identify() -> lightning.Caller | None:
    """The innermost component; without any, the nearest function of the user's own code. None if there is neither."""
    if not _installed:
        return None
    path = component_path() or user_functions()
    return lightning.Caller(agent=path[-1], path=path, framework="raw") if path else None
