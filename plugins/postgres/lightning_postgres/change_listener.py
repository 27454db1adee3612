"""Notices changes by LISTEN, on its own connection, which is opened for the first watch.

The invariant: a change is notified with its commit. If the connection is lost, every watch is woken then, and again when there
is a new connection, so that no change is missed.
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
"""Seconds between queries that check the connection, because a machine that is gone does not close it."""
RETRY: Final = 0.5


class Listener:
    """Listens for changes and rings the bell of the process's watches. It belongs to one event loop; the watches may be on
    any."""

    def __init__(self, settings: Settings, bell: Bell, lost: Callable[[], object]) -> None:
        """`lost` is called whenever the connection is lost."""
        self._settings, self._bell, self._lost = settings, bell, lost
        self._task: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._error: Exception = TimeoutError("no answer")

    async def begin(self) -> None:
        """Start listening, and return when changes are noticed. Raises `StoreError` if the server cannot be reached or
        refuses."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._listen())
        if not await is_set_within(self._ready, self._settings.timeout):
            refused = failures.translate(self._error, self._settings)
            raise refused from self._error

    async def close(self) -> None:
        """Stop listening, and wake all watches."""
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
            except Exception as error:  # noqa: BLE001 — after any error watches are woken and it is tried again
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
    """A `RunWatch` that the bell wakes. `check` raises an error after the store was closed."""

    def __init__(self, event: asyncio.Event, check: Callable[[], object]) -> None:
        self._event, self._check = event, check

    async def wait(self, timeout: float) -> bool:
        """Return True at the next change, False after `timeout` seconds without one (`RunWatch.wait`). Raises `StoreError`
        after the store was closed."""
        changed = await is_set_within(self._event, timeout)
        self._check()
        self._event.clear()
        return changed
