"""Answers that go on: changes as server-sent events.

The invariant: a stream ends when its client goes, when the server stops, or when the next wait fails (the store is away, the
token was revoked), and a client that goes on with the last event's `since` misses nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from lightning.gateway.http import client_left, event_of
from starlette.types import Receive, Send

from lightning_server import json_codec
from lightning_server.messages import Changed

log = logging.getLogger(__name__)
PING = 15.0
"""Seconds without a change until a comment is sent, which keeps proxies from cutting the stream."""


async def stream(
    send: Send, receive: Receive, wait: Callable[[str, float], Awaitable[Changed]], since: str, stopped: asyncio.Event
) -> None:
    """Send an event for each change; `wait(since, timeout)` waits for the next. Raises what the first `wait` raises."""
    first = await wait(since, 0)
    headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await _send(send, _event(first))
    gone = asyncio.create_task(client_left(receive))
    try:
        since = first.since
        while not gone.done() and not stopped.is_set():
            waiting = asyncio.ensure_future(wait(since, PING))
            try:
                await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiting.cancel()
            if gone.done():
                break
            if (fault := waiting.exception()) is not None:
                log.info("a stream of changes ends: %s", fault)
                break
            changed = waiting.result()
            since = changed.since
            await _send(send, _event(changed) if changed.changed else b": nothing new\n\n")
        await send({"type": "http.response.body", "body": b"", "more_body": False})
    finally:
        gone.cancel()


def _event(changed: Changed) -> bytes:
    return event_of(json_codec.write(json_codec.codec_of(Changed).encode(changed)), "changed")


async def _send(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
