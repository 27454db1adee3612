"""Notices that the agent hung up while its call is being served.

The invariant: within the block, a client that goes away cancels what is being awaited at once, and the block ends with
`ClientGoneError`; after the block nothing is cancelled any more.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.types import Message, Receive

from lightning.gateway.body import ClientGoneError


class Watch:
    """`with Watch(receive): ...` around everything that is only worth doing while the agent listens.

    Works like `asyncio.timeout`: it cancels the task from outside and turns that cancellation into its own error.
    """

    __slots__ = ("_gone", "_listener", "_over", "_receive", "_task")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = self._over = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._listener: asyncio.Future[Message] = asyncio.ensure_future(self._receive())
        self._listener.add_done_callback(self._heard)

    def _heard(self, listener: asyncio.Future[Message]) -> None:
        if listener.cancelled() or self._over:
            return
        failed = listener.exception() is not None
        if failed or listener.result()["type"] == "http.disconnect":
            self._gone = True
            self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        self._listener.cancel()
        if self._gone and self._task.uncancel() == 0 and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise ClientGoneError from error
