"""Hearing of changes: at once from this process, within a poll from others on the same file.

The invariant: a change is counted in the transaction that makes it, and a watch remembers the count it has told: so none is
missed, whatever is lost on the way.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

from lightning.store.relational.notify import Bell
from lightning.store.relational.transaction import Transaction

SELECT_REVISION: Final = "SELECT n FROM revisions WHERE run = ?"
POLL: Final = 0.05
"""Seconds between looks for what another process changed; a look is one indexed read."""


async def revision(transaction: Transaction, run: str) -> int:
    """How often the run has changed."""
    row = await transaction.one(SELECT_REVISION, (run,))
    return int(row[0]) if row else 0


class RevisionWatch:
    """A `RunWatch` that compares how often a run has changed with what it knew."""

    def __init__(self, revision: Callable[[], Awaitable[int]], event: asyncio.Event, known: int) -> None:
        self._revision, self._event, self._known = revision, event, known

    async def wait(self, timeout: float) -> bool:
        """See `Watch.wait`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while True:
            self._event.clear()
            revision = await self._revision()
            if revision != self._known:
                self._known = revision
                return True
            left = deadline - loop.time()
            if left <= 0:
                return False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(POLL, left)):
                    await self._event.wait()


@asynccontextmanager
async def watching(bell: Bell, run: str, revision: Callable[[], Awaitable[int]]) -> AsyncIterator[RevisionWatch]:
    """A watch from now on."""
    event = asyncio.Event()
    with bell.listening(run, event):
        yield RevisionWatch(revision, event, await revision())
