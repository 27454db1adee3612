"""Hearing of changes over HTTP, by requests that a server answers when there is news.

The invariant: every request says what the last one told, so a change between two of them is told by the next, whichever server
answers it. Servers that take turns behind one URL are asked now and then, not without end: each answers at once what it did not
tell itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Final, Self

from lightning_server.messages import Changed

ROUND: Final = 25.0
"""Seconds of one request; proxies cut off longer ones."""
FIRST_PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 4.0
"""Seconds until the next question when another server answered than the one that told the last."""


class HttpWatch:
    """A `RunWatch`. `ask(since, timeout)` asks a server; None means that none could say in that time."""

    def __init__(self, ask: Callable[[str, float], Awaitable[Changed | None]]) -> None:
        self._ask = ask
        self._since, self._pause = "", 0.0
        self._told: dict[str, str] = {}  # what each server told last, by what it calls its watch

    async def __aenter__(self) -> Self:
        first = await self._ask("", 0.0)
        assert first is not None, "without a `since` the store raises"
        self._heard(first)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is held between requests."""

    async def wait(self, timeout: float) -> bool:
        """See `RunWatch.wait`. True also when no server could be asked in that time: something may have changed."""
        deadline = time.monotonic() + timeout
        while True:
            await asyncio.sleep(min(self._pause, max(deadline - time.monotonic(), 0.0)))
            left = max(deadline - time.monotonic(), 0.0)
            changed = await self._ask(self._since, min(left, ROUND))
            if changed is None or self._heard(changed):
                return True
            if time.monotonic() >= deadline:
                return False

    def _heard(self, changed: Changed) -> bool:
        """Whether there is news in an answer. None in that of another server which has told the same before."""
        watch = changed.since.rpartition(".")[0]
        if watch == self._since.rpartition(".")[0]:
            self._pause = 0.0
        elif self._since:
            self._pause = min(max(2 * self._pause, FIRST_PAUSE), LONGEST_PAUSE)
        news = changed.changed and self._told.get(watch) != changed.since
        self._since = self._told[watch] = changed.since
        return news
