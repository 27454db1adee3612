"""Who started the thread that runs here.

The invariant: a thread knows its starter only while the rollout that it was started in goes on.
"""

from __future__ import annotations

from contextvars import Context, ContextVar
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from lightning.instrument.context import Session


class Starter(NamedTuple):
    """The code that started a thread, or gave work to a pool's."""

    context: Context
    """A copy: what was set there by then."""
    session: Session
    components: tuple[str, ...]


starter: ContextVar[Starter | None] = ContextVar("lightning_starter", default=None)


def starter_here() -> Starter | None:
    """Who started this thread; None without a starter in a rollout that goes on."""
    found = starter.get()
    return found if found is not None and found.session.open else None
