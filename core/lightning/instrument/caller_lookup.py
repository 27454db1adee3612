"""Who is calling now: first what a user's own code registered is asked, then the adapters.

The invariant: nobody who is asked can cost the agent its call; whoever raises is left out of this answer and named once.
"""

from __future__ import annotations

from collections.abc import Callable

from lightning.instrument.context import log_once
from lightning.types import Caller

_asked: tuple[Callable[[], Caller | None], ...] = ()


def ask(identify: Callable[[], Caller | None]) -> None:
    """Ask `identify` before every adapter, as `lightning_identify` is asked; again: does nothing.

    For a handler that users register with their framework by hand, which has to work where its adapter is not installed or
    is disabled. It stays for the life of the process, so it answers None unless such a handler sees the running call.
    """
    global _asked
    if identify not in _asked:
        _asked = (*_asked, identify)


def current_caller() -> Caller | None:
    """Who makes the call that this thread or task is about to send; None when nobody knows."""
    for identify in _asked:
        try:
            if (caller := identify()) is not None:
                return caller
        except Exception as error:  # noqa: BLE001 — isolates what a user registered
            log_once(f"asked {identify!r}", "%r was asked who is calling and failed: %r (said once)", identify, error)
    from lightning.plugins import plugins

    return plugins().identify()
