"""Ends a call that is not worth waiting for any longer: the agent hung up, or vLLM fell silent.

The invariant: within the block, either of the two cancels what is being awaited at once and ends the block with
`ClientGoneError` or `UpstreamError`; after the block nothing is cancelled any more.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.types import Message, Receive

from lightning.gateway.body import ClientGoneError
from lightning.gateway.errors import UpstreamError
from lightning.gateway.versions import LiveCall


class Watch:
    """`with Watch(receive, call, patience): ...` around everything between the request and the end of vLLM's answer.

    Works like `asyncio.timeout`: it cancels the task from outside and turns that cancellation into its own error. vLLM
    may be silent for `patience` seconds at a time, by `LiveCall.heard_at`. There is one timer for a call, which looks
    again when it fires: aiohttp's own read timeout sets a new one for every packet, 5 % of a call's CPU.
    """

    __slots__ = ("_call", "_error", "_listener", "_loop", "_over", "_patience", "_receive", "_task", "_timer")

    def __init__(self, receive: Receive, call: LiveCall, patience: float) -> None:
        self._receive, self._call, self._patience = receive, call, patience
        self._error: Exception | None = None
        self._over = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._loop = task.get_loop()
        self._listener: asyncio.Future[Message] = self._loop.create_task(_message(self._receive))
        self._listener.add_done_callback(self._heard_agent)
        self._timer = self._loop.call_later(self._patience, self._look)

    def _heard_agent(self, listener: asyncio.Future[Message]) -> None:
        if self._over or listener.cancelled():
            return
        if listener.exception() is not None or listener.result()["type"] == "http.disconnect":
            self._end(ClientGoneError())

    def _look(self) -> None:
        silent = self._loop.time() - self._call.heard_at if self._call.waits_for_bytes else 0.0
        if silent >= self._patience:
            self._end(UpstreamError(f"no byte came for {self._patience:g} s (gateway.upstream_timeout)"))
        else:
            self._timer = self._loop.call_later(self._patience - silent, self._look)

    def _end(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
            self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        self._listener.cancel()
        self._timer.cancel()
        if self._error is not None and self._task.uncancel() == 0 and isinstance(error, asyncio.CancelledError):
            raise self._error from error


async def _message(receive: Receive) -> Message:
    return await receive()
