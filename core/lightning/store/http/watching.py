"""Hearing of changes over HTTP, by requests that a server answers when there is news.

The invariant: every request says what the last one told, so a change between two of them is told by the next, whichever server
answers it.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Final, Self

from lightning.store.messages import Changed

ROUND: Final = 25.0
"""Seconds of one request; proxies cut off longer ones."""


class HttpWatch:
    """A `Watch`. `ask(since, timeout)` asks a server; None means that none could say in that time."""

    def __init__(self, ask: Callable[[str, float], Awaitable[Changed | None]]) -> None:
        self._ask = ask
        self._since = ""

    async def __aenter__(self) -> Self:
        first = await self._ask("", 0.0)
        assert first is not None, "without a `since` the store raises"
        self._since = first.since
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is held between requests."""

    async def wait(self, timeout: float) -> bool:
        """See `Watch.wait`. True also when no server could be asked in that time: something may have changed."""
        deadline = time.monotonic() + timeout
        while True:
            left = max(deadline - time.monotonic(), 0.0)
            changed = await self._ask(self._since, min(left, ROUND))
            if changed is None:
                return True
            if changed.changed:
                self._since = changed.since
                return True
            if time.monotonic() >= deadline:
                return False
