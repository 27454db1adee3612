"""Hearing of changes by LISTEN, on a connection of its own that is opened when somebody watches for the first time.

The invariant: a change is told with the commit that makes it, and while nobody can be told, every watch is woken when that
begins and again when it ends: so none is missed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from lightning.asyncio_utils import end, is_set_within
from lightning.store.threads import Bell

from lightning_postgres import failures
from lightning_postgres.connection import channel, connect
from lightning_postgres.settings import Settings

PING: Final = 10.0
"""Seconds between questions to the server: a machine that is gone does not close its connections."""
RETRY: Final = 0.5


class Listener:
    """Belongs to one event loop; rings the bell for all of them."""

    def __init__(self, settings: Settings, bell: Bell, lost: Callable[[], object]) -> None:
        """`lost` is called whenever the connection turns out to be of no more use."""
        self._settings, self._bell, self._lost = settings, bell, lost
        self._task: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._error: Exception = TimeoutError("no answer")

    async def begin(self) -> None:
        """Return when changes are heard. Raises `StoreError` when the server cannot be reached or refuses."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._listen())
        if not await is_set_within(self._ready, self._settings.timeout):
            refused = failures.translate(self._error, self._settings)
            raise refused from self._error

    async def close(self) -> None:
        """Hear no more."""
        if self._task is not None:
            await end(self._task)
        self._bell.ring()

    async def _listen(self) -> None:
        while True:
            connection: Any = None
            try:
                connection = await connect(self._settings, statement_seconds=self._settings.timeout)
                lost = asyncio.Event()
                connection.add_termination_listener(lambda _, lost=lost: lost.set())
                await connection.add_listener(channel(self._settings), self._heard)
                self._ready.set()
                self._bell.ring()
                await self._stay(connection, lost)
            except Exception as error:  # noqa: BLE001 — whatever it is, watches are woken and it is tried again
                self._error = error
            finally:
                if connection is not None:
                    connection.terminate()
            if self._ready.is_set():
                self._ready.clear()
                self._lost()
                self._bell.ring()
            await asyncio.sleep(RETRY)

    async def _stay(self, connection: Any, lost: asyncio.Event) -> None:
        while not lost.is_set():
            if not await is_set_within(lost, PING):
                await connection.execute("SELECT 1", timeout=PING)

    def _heard(self, _connection: Any, _process: int, _channel: str, payload: str) -> None:
        self._bell.ring([payload])


class EventWatch:
    """A `RunWatch` that the bell wakes. `check` raises when there is nothing more to hear."""

    def __init__(self, event: asyncio.Event, check: Callable[[], object]) -> None:
        self._event, self._check = event, check

    async def wait(self, timeout: float) -> bool:
        """See `RunWatch.wait`. Raises `StoreError` after the store was closed."""
        changed = await is_set_within(self._event, timeout)
        self._check()
        self._event.clear()
        return changed
