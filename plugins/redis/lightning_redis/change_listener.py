"""Listening for changes: Redis answers a listener when the stream of a run has a new entry.

The invariant: each change is an entry of the run's stream, which keeps the last one. A watch compares it with the last entry
that it reported, so that no change is missed while the connection is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

from lightning.asyncio_utils import end
from redis.exceptions import RedisError

from lightning_redis.connection import REPLY_SECONDS, Reply, Wire, pause
from lightning_redis.handshake import asker
from lightning_redis.settings import Settings

BLOCK_MS: Final = 10_000
"""Milliseconds that a listener waits in Redis: fewer than those after which a server counts as away."""


def newest(stream: bytes) -> tuple[bytes, ...]:
    """Return the command that reads the last entry of a stream."""
    return (b"XREVRANGE", stream, b"+", b"-", b"COUNT", b"1")


def entry_of(reply: Reply) -> bytes:
    """Return the last entry's id from the reply to `newest`."""
    return bytes(reply[0][0]) if reply else b"0-0"


class _Listener:
    """One connection for all watches of a run on this loop. It only wakes them; each reads the change itself."""

    def __init__(self, settings: Settings, stream: bytes) -> None:
        self._stream = stream
        self._wire = Wire(settings, REPLY_SECONDS)
        self.watching = set[asyncio.Event]()
        self.task = asyncio.create_task(self._main(), name="lightning-store-redis-watch")

    async def _main(self) -> None:
        attempt = 0
        try:
            while True:
                try:
                    await self._listen()
                except (RedisError, OSError, EOFError):
                    await self._wire.disconnect()
                    await asyncio.sleep(pause(attempt))
                    attempt += 1
        finally:
            await self._wire.disconnect()

    async def _listen(self) -> None:
        """Connect and listen until the connection is lost. A new connection wakes all watches, since changes may have been
        missed."""
        await self._wire.connect()
        ask = asker(self._wire.exchange)
        last = entry_of(await ask(*newest(self._stream)))
        self.wake()
        while True:
            found = await ask(b"XREAD", b"BLOCK", b"%d" % BLOCK_MS, b"STREAMS", self._stream, last)
            if found:
                last = found[0][1][-1][0]
                self.wake()

    def wake(self) -> None:
        """Wake all watches."""
        for event in self.watching:
            event.set()


class Listeners:
    """The listeners of one loop; each lives as long as its run is watched."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._by_stream: dict[bytes, _Listener] = {}

    @contextlib.asynccontextmanager
    async def listening(self, stream: bytes) -> AsyncIterator[asyncio.Event]:
        """Give an event that is set when the stream grows, for the length of the block."""
        listener = self._by_stream.get(stream)
        if listener is None or listener.task.done():
            listener = self._by_stream[stream] = _Listener(self._settings, stream)
        event = asyncio.Event()
        listener.watching.add(event)
        try:
            yield event
        finally:
            listener.watching.discard(event)
            if not listener.watching:
                if self._by_stream.get(stream) is listener:
                    del self._by_stream[stream]
                await _end(listener)

    async def close(self) -> None:
        """Stop listening. Remaining watches are woken once, and find the store closed."""
        listeners, self._by_stream = list(self._by_stream.values()), {}
        for listener in listeners:
            await _end(listener)


async def _end(listener: _Listener) -> None:
    listener.wake()
    await end(listener.task)
