"""Ends a call that is not worth waiting for any longer: the agent hung up, or vLLM fell silent and its engine does not answer.

The invariant: within the block, either of the two cancels what is being awaited at once and ends the block with
`ClientGoneError` or `UpstreamError`; after the block nothing is cancelled any more.

Silence alone proves nothing: vLLM sends no byte of an answer that is not streamed before its last token, nor of any call that
still waits for its turn. Asking for a stream and putting it together would not tell the agent the same: vLLM reads tool calls
and reasoning by one parser in a stream and by another in a whole answer, and what the model wrote badly comes out as arguments
of one and as text of the other. So a server that was silent for too long is asked whether its engine still works.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from types import TracebackType

from starlette.types import Message, Receive

from lightning.gateway.body import ClientGoneError
from lightning.gateway.errors import UpstreamError
from lightning.gateway.fleet.versions import LiveCall

logger = logging.getLogger(__name__)


class Watch:
    """`with Watch(receive, call, patience, works): ...` around everything between the request and the end of vLLM's answer.

    Works like `asyncio.timeout`: it cancels the task from outside and turns that cancellation into its own error. When vLLM
    was silent for `patience` seconds, by `LiveCall.heard_at`, `works` has as long again to say that it works on; then it may
    be silent for another `patience` seconds. There is one timer for a call, which looks
    again when it fires: aiohttp's own read timeout sets a new one for every packet, 5 % of a call's CPU.
    """

    __slots__ = (
        "_asking",
        "_call",
        "_error",
        "_listener",
        "_loop",
        "_over",
        "_patience",
        "_receive",
        "_task",
        "_timer",
        "_works",
    )

    def __init__(self, receive: Receive, call: LiveCall, patience: float, works: Callable[[], Awaitable[bool]]) -> None:
        self._receive, self._call, self._patience, self._works = receive, call, patience, works
        self._asking: asyncio.Task[None] | None = None
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
            self._asking = self._loop.create_task(self._ask())
        else:
            self._timer = self._loop.call_later(self._patience - silent, self._look)

    async def _ask(self) -> None:
        """Let the silent server show that it works on, or end the call."""
        heard_at, works = self._call.heard_at, False
        failed = "did not answer when it was asked"
        try:
            async with asyncio.timeout(self._patience):
                works = await self._works()
        except TimeoutError:
            pass
        except Exception as error:  # nobody would look again, and the call would wait for ever
            logger.exception("whether the engine of a silent call works could not be asked")
            failed = f"could not be asked ({type(error).__name__})"
        if self._over:
            return
        if works:
            self._call.heard_at = self._loop.time()
        if works or self._call.heard_at != heard_at or not self._call.waits_for_bytes:
            self._look()
            return
        silent = f"no byte came for {self._patience:g} s (gateway.upstream_timeout)"
        self._end(UpstreamError(f"{silent}, and its engine {failed}"))

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
        if self._asking is not None:
            self._asking.cancel()
        if self._error is not None and self._task.uncancel() == 0 and isinstance(error, asyncio.CancelledError):
            raise self._error from error


async def _message(receive: Receive) -> Message:
    return await receive()
