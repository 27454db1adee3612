"""Who started the thread that runs here.

The invariant: a thread knows its starter only while the rollout that it was started in goes on; one that is started by what a
rollout has left behind knows that for good, and is nobody's.
"""

from __future__ import annotations

from contextvars import Context, ContextVar
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from lightning.instrument.context import ActiveAttempt


class Starter(NamedTuple):
    """The code that started a thread, or gave work to a pool's."""

    context: Context
    """A copy: what was set there by then."""
    attempt: ActiveAttempt
    components: tuple[str, ...]
    left_behind: bool = False
    """Whether the rollout had ended by then."""


starter: ContextVar[Starter | None] = ContextVar("lightning_starter", default=None)


def starter_here() -> Starter | None:
    """Who started this thread; None without a starter, and where the rollout has ended since."""
    found = starter.get()
    return found if found is not None and (found.attempt.open or found.left_behind) else None
