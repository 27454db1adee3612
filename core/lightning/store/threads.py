"""Gives work to a store's thread and the result back to the waiting task, and wakes the tasks that watch a run.

The invariant: a caller gets the result on its own event loop. The work of a caller that was cancelled before its turn is
skipped. A later cancellation disturbs no other work, and ends the work only if the caller asked for that. Each ring for a run
wakes all of its watches.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from lightning.errors import StoreError

T = TypeVar("T")


class WorkItem(Generic[T]):
    """Work for a thread, with its result or error, and the task on `loop` that waits for it."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.waiter: asyncio.Future[T] = self.loop.create_future()
        self.result: T | None = None
        self.error: Exception | None = None

    def deliver(self) -> None:
        """Give the result or the error to the waiting task. Call it on the task's loop."""
        if self.waiter.done():
            return
        if self.error is not None:
            self.waiter.set_exception(self.error)
        else:
            self.waiter.set_result(self.result)  # type: ignore[arg-type]  # T may be Optional itself


def deliver(jobs: Sequence[WorkItem[Any]]) -> None:
    """Deliver finished work. Each loop is woken once for all of its tasks, because each wake-up may switch threads."""
    by_loop: dict[asyncio.AbstractEventLoop, list[WorkItem[Any]]] = {}
    for job in jobs:
        by_loop.setdefault(job.loop, []).append(job)
    for loop, theirs in by_loop.items():
        with contextlib.suppress(RuntimeError):  # on a closed loop nobody waits
            loop.call_soon_threadsafe(_deliver_here, theirs)


def _deliver_here(jobs: Sequence[WorkItem[Any]]) -> None:
    for job in jobs:
        job.deliver()


def closed_error(place: str) -> StoreError:
    """Return the error for using a store that is not open."""
    return StoreError(f"store {place} is not open: await store.open() first, and use it before close()")


def check_process(place: str, process: int) -> None:
    """Raise `StoreError` unless this is the `process` that opened the store, and not a fork of it."""
    if process != os.getpid():
        raise StoreError(
            f"store {place} was opened in process {process} and is used in its fork {os.getpid()}: "
            "open a store of its own in each process"
        )


class Bell:
    """Wakes the watches of this process, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, set[tuple[asyncio.AbstractEventLoop, asyncio.Event]]] = {}

    def ring(self, runs: Iterable[str] | None = None) -> None:
        """Wake the watches of these runs; with None all watches, if it is unknown what has changed."""
        with self._lock:
            woken = [
                waiter for run in (self._waiting if runs is None else runs) for waiter in self._waiting.get(run, ())
            ]
        for loop, event in woken:
            with contextlib.suppress(RuntimeError):  # on a closed loop nobody waits
                loop.call_soon_threadsafe(event.set)

    @contextlib.contextmanager
    def listening(self, run: str, event: asyncio.Event) -> Iterator[None]:
        """Set `event`, which belongs to the running loop, at each ring for the run during the block."""
        waiter = (asyncio.get_running_loop(), event)
        with self._lock:
            self._waiting.setdefault(run, set()).add(waiter)
        try:
            yield
        finally:
            with self._lock:
                self._waiting[run].discard(waiter)
                if not self._waiting[run]:
                    del self._waiting[run]


class LookingWatch(Generic[T]):
    """A `RunWatch` that compares the result of `look` with the last one (`known`). It looks when `event` is set, and every
    `poll` seconds, because other processes may change the run without setting the event."""

    def __init__(
        self, look: Callable[[], Awaitable[T]], event: asyncio.Event, known: T, poll: float = math.inf
    ) -> None:
        self._look, self._event, self._known, self._poll = look, event, known, poll

    async def wait(self, timeout: float) -> bool:
        """Return True at the next change, False after `timeout` seconds without one (`RunWatch.wait`)."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while True:
            self._event.clear()
            found = await self._look()
            if found != self._known:
                self._known = found
                return True
            left = deadline - loop.time()
            if left <= 0:
                return False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(self._poll, left)):
                    await self._event.wait()
