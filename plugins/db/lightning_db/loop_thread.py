"""An event loop in its own thread, for a store that talks to a server: the store's connections belong to one loop, and its
callers may be on any loop.

The invariant: a caller gets the result on its own loop. Work that was submitted before `close` is done before `close` returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from lightning.asyncio_utils import new_loop
from lightning.store.threads import WorkItem, deliver

T = TypeVar("T")


class _Work(WorkItem[T]):
    """A coroutine to run on the thread's loop."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        super().__init__()
        self.work = work
        self.task: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        """Cancel the coroutine. Call it on the thread's loop."""
        if self.task is not None:
            self.task.cancel()

    async def run(self) -> None:
        """Run the coroutine, unless its caller was cancelled, and keep its result or error."""
        if self.waiter.cancelled():
            return
        try:
            self.result = await self.work()
        except Exception as error:  # noqa: BLE001 — it belongs to the caller
            self.error = error


class LoopThread:
    """A thread with an event loop, to which any loop can submit coroutines. A loop is woken once for all work that came or
    ended at the same time."""

    def __init__(self, name: str) -> None:
        self.loop = new_loop()
        self._lock = threading.Lock()
        self._closed = False
        self._arrived: deque[_Work[Any]] = deque()
        self._finished: list[_Work[Any]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], Coroutine[Any, Any, T]], *, followed: bool = False) -> asyncio.Future[T] | None:
        """Run a coroutine in the thread, for the running loop to wait for; None after `close`. One that is `followed` ends when
        its caller gives up."""
        job = _Work(work)

        def follow(waiter: asyncio.Future[T]) -> None:
            if waiter.cancelled():
                with contextlib.suppress(RuntimeError):  # the thread's loop was closed: it has ended
                    self.loop.call_soon_threadsafe(job.cancel)

        if followed:
            job.waiter.add_done_callback(follow)
        with self._lock:
            if self._closed:
                return None
            self._arrived.append(job)
            if len(self._arrived) == 1:
                self.loop.call_soon_threadsafe(self._begin)
        return job.waiter

    def close(self, goodbye: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Wait for the submitted work, run `goodbye`, and end the thread. Blocks until that is done; idempotent."""
        with self._lock:
            first, self._closed = not self._closed, True
        if first:
            asyncio.run_coroutine_threadsafe(self._drain(goodbye), self.loop).result()
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()

    async def _drain(self, goodbye: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._begin()
        while self._tasks:
            await asyncio.wait(self._tasks)
        await goodbye()
        self._deliver()

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    def _begin(self) -> None:
        while True:
            with self._lock:
                arrived = list(self._arrived)
                self._arrived.clear()
            if not arrived:
                return
            for job in arrived:
                job.task = self.loop.create_task(self._run(job))
                self._tasks.add(job.task)
                job.task.add_done_callback(self._tasks.discard)

    async def _run(self, job: _Work[Any]) -> None:
        await job.run()
        self._finished.append(job)
        if len(self._finished) == 1:
            self.loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        finished, self._finished = self._finished, []
        deliver(finished)
