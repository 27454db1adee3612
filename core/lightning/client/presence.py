"""Whether servers answer, and the one word about it when they do not.

The invariant: each kind of question that nobody answers is told of once until it is answered again, and one failure of all of
them once in all.
"""

from __future__ import annotations

import logging
import time

from lightning.errors import UnavailableError

logger = logging.getLogger(__name__)

ONE_FAILURE = 30.0
"""Seconds between two kinds of questions going unanswered, below which they do for one reason."""


class Presence:
    """Hears of every question of one client whether a server has answered it."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def away(self, question: str, error: UnavailableError) -> None:
        """No server answered this kind of question."""
        now = time.monotonic()
        known = question in self._since or any(now - since < ONE_FAILURE for since in self._since.values())
        self._since.setdefault(question, now)
        if not known:
            logger.warning("%s. Agents that run go on; this client asks again", error)

    def back(self, question: str) -> None:
        """A server answered this kind of question."""
        since = self._since.pop(question, None)
        if since is not None and not self._since:
            logger.warning("a server answers again after %.0f s", time.monotonic() - since)
