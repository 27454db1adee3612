"""The thread in which a process talks to PostgreSQL: a connection belongs to one event loop, a store to all of them.

The invariant: a caller is told on its own loop, after the commit; one that gives up before its turn is skipped, and one that
gives up later disturbs nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from lightning.asyncio_utils import new_loop

T = TypeVar("T")


class _Job(Generic[T]):
    """A coroutine to run in the thread and the task on `loop` that waits for it."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self.work = work
        self.loop = asyncio.get_running_loop()
        self.waiter: asyncio.Future[T] = self.loop.create_future()
        self.result: T | None = None
        self.error: Exception | None = None

    async def run(self) -> None:
        """Run it, unless its caller is gone."""
        if self.waiter.cancelled():
            return
        try:
            self.result = await self.work()
        except Exception as error:  # noqa: BLE001 — it belongs to the caller
            self.error = error

    def deliver(self) -> None:
        """Tell the caller, on the caller's loop."""
        if self.waiter.done():
            return
        if self.error is not None:
            self.waiter.set_exception(self.error)
        else:
            self.waiter.set_result(self.result)  # type: ignore[arg-type]  # T may be Optional itself


class LoopThread:
    """An event loop of its own. Loops are woken once for all jobs that came or ended together."""

    def __init__(self, name: str) -> None:
        self.loop = new_loop()
        self._lock = threading.Lock()
        self._closed = False
        self._arrived: deque[_Job[Any]] = deque()
        self._finished: list[_Job[Any]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], Coroutine[Any, Any, T]]) -> asyncio.Future[T] | None:
        """Run a coroutine in the thread, for the running loop to wait for; None after `close`."""
        job = _Job(work)
        with self._lock:
            if self._closed:
                return None
            self._arrived.append(job)
            if len(self._arrived) == 1:
                self.loop.call_soon_threadsafe(self._begin)
        return job.waiter

    def close(self, goodbye: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Wait for what was submitted, run `goodbye`, end the thread. Blocks; idempotent."""
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
                task = self.loop.create_task(self._run(job))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _run(self, job: _Job[Any]) -> None:
        await job.run()
        self._finished.append(job)
        if len(self._finished) == 1:
            self.loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[_Job[Any]]] = {}
        for job in self._finished:
            by_loop.setdefault(job.loop, []).append(job)
        self._finished.clear()
        for loop, jobs in by_loop.items():
            with contextlib.suppress(RuntimeError):  # a closed loop has nobody left who waits
                loop.call_soon_threadsafe(_deliver_here, jobs)


def _deliver_here(jobs: list[_Job[Any]]) -> None:
    for job in jobs:
        job.deliver()
