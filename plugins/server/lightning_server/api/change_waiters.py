"""Waiting for changes over HTTP: any number of clients wait for one run, and one watch of the store serves them all.

The invariant: a client that sends the `since` of its last answer hears of every change after it, from whichever server it asks:
a server that does not know a `since` answers that something may have changed. A stream of events ends when its client
disconnects, when the server stops, or when the next wait fails (the store does not answer, the token was revoked).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from dataclasses import dataclass, field

from lightning.asyncio_utils import cancel
from lightning.errors import LightningError, UnavailableError
from lightning.gateway.http import event_of
from lightning.store.protocol import Store

from lightning_server import json_codec
from lightning_server.errors import ApiError
from lightning_server.messages import Changed

log = logging.getLogger(__name__)
LONGEST_WAIT = 60.0
"""The longest wait of one request in seconds; proxies cut off longer ones."""
IDLE = 90.0
"""A watch of the store ends after this many seconds without a waiting client."""
ROUND = 30.0


@dataclass(slots=True)
class _Topic:
    name: str
    changes: int = 0
    waiting: int = 0
    left_at: float = 0.0
    news: asyncio.Condition = field(default_factory=asyncio.Condition)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    @property
    def since(self) -> str:
        return f"{self.name}.{self.changes}"


class Watchers:
    """The watches of one server; all methods belong to its event loop."""

    def __init__(self) -> None:
        self._server = secrets.token_hex(6)
        self._numbers = itertools.count()
        self._topics: dict[Hashable, _Topic] = {}
        self._closed = False

    async def wait(self, store: Store, key: Hashable, run: str, since: str, timeout: float) -> Changed:
        """Return as soon as something of the run may have changed after `since`, or after `timeout` seconds; at once for an
        unknown or empty `since`. Callers with the same `key` share one watch, so they must see the same store."""
        topic = self._topic(store, key, run)
        topic.waiting += 1
        try:
            await self._begun(topic)
            if since == topic.since and not self._closed:
                await self._changed(topic, min(timeout, LONGEST_WAIT))
            return Changed(since != topic.since, topic.since)
        finally:
            topic.waiting -= 1
            topic.left_at = asyncio.get_running_loop().time()

    async def close(self) -> None:
        """End all waits with what they know. Later waits return at once."""
        self._closed = True
        for topic in list(self._topics.values()):
            async with topic.news:
                topic.news.notify_all()
        await cancel(*(topic.task for topic in self._topics.values() if topic.task is not None))

    def _topic(self, store: Store, key: Hashable, run: str) -> _Topic:
        topic = self._topics.get(key)
        if topic is None:
            topic = self._topics[key] = _Topic(f"{self._server}.{next(self._numbers)}")
            topic.task = asyncio.create_task(self._listen(store, key, run, topic), name=f"lightning-watch {run}")
        return topic

    async def _begun(self, topic: _Topic) -> None:
        """Return when the watch of the store has begun. Raises the error that kept it from beginning."""
        assert topic.task is not None
        if not topic.begun.is_set():
            begun = asyncio.create_task(topic.begun.wait())
            await asyncio.wait({begun, topic.task}, return_when=asyncio.FIRST_COMPLETED)
            begun.cancel()
        if topic.task.done() and not topic.begun.is_set():
            if topic.task.cancelled():
                raise UnavailableError("the server is stopping: ask another one")
            topic.task.result()

    async def _changed(self, topic: _Topic, timeout: float) -> None:
        before = topic.changes
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout), topic.news:
                await topic.news.wait_for(lambda: topic.changes != before or self._closed)

    async def _listen(self, store: Store, key: Hashable, run: str, topic: _Topic) -> None:
        loop = asyncio.get_running_loop()
        topic.left_at = loop.time()
        try:
            async with store.watch(run) as watch:
                topic.begun.set()
                while topic.waiting or loop.time() - topic.left_at < IDLE:
                    if await watch.wait(ROUND):
                        await self._tell(topic)
        except LightningError as error:
            if not topic.begun.is_set():
                raise
            log.warning("watching run %r ended, and begins again when it is asked for: %s", run, error)
        finally:
            # All waits for this watch end, and the next `since` of each client is unknown: no change is missed.
            self._topics.pop(key, None)
            if topic.begun.is_set() and not self._closed:
                await self._tell(topic)

    @staticmethod
    async def _tell(topic: _Topic) -> None:
        async with topic.news:
            topic.changes += 1
            topic.news.notify_all()


PING = 15.0
"""After this many seconds without a change a comment is sent, so that proxies keep the stream open."""


async def events(
    first: Changed, wait: Callable[[str, float], Awaitable[Changed]], stopped: asyncio.Event
) -> AsyncIterator[bytes]:
    """Yield a server-sent event for each change, `first` included. `wait(since, timeout)` waits for the next change. A failed
    wait, or `stopped`, ends the stream."""
    yield _event(first)
    since = first.since
    while not stopped.is_set():
        try:
            changed = await wait(since, PING)
        except (ApiError, LightningError) as fault:
            log.info("a stream of changes ends: %s", fault)
            return
        since = changed.since
        yield _event(changed) if changed.changed else b": nothing new\n\n"


def _event(changed: Changed) -> bytes:
    return event_of(json_codec.to_bytes(changed), "changed")
