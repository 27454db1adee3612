"""Handing work over to a thread and its result back, and waking the tasks that watch for what a thread learned: what every
store does that has a thread of its own.

The invariant: a caller is told on its own loop, when the work is done; one that gives up before its turn is skipped, and one
that gives up later disturbs nobody, unless it asked for the work to end with it. Whoever listens for a run is
woken by each ring for it.
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
    """Something that a thread does, and the task on `loop` that waits for it."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.waiter: asyncio.Future[T] = self.loop.create_future()
        self.result: T | None = None
        self.error: Exception | None = None

    def deliver(self) -> None:
        """Tell the caller, on the caller's loop."""
        if self.waiter.done():
            return
        if self.error is not None:
            self.waiter.set_exception(self.error)
        else:
            self.waiter.set_result(self.result)  # type: ignore[arg-type]  # T may be Optional itself


def deliver(jobs: Sequence[WorkItem[Any]]) -> None:
    """Wake each loop once for all its callers: a wake-up for each would hand the interpreter lock to and fro."""
    by_loop: dict[asyncio.AbstractEventLoop, list[WorkItem[Any]]] = {}
    for job in jobs:
        by_loop.setdefault(job.loop, []).append(job)
    for loop, theirs in by_loop.items():
        with contextlib.suppress(RuntimeError):  # a closed loop has nobody left who waits
            loop.call_soon_threadsafe(_deliver_here, theirs)


def _deliver_here(jobs: Sequence[WorkItem[Any]]) -> None:
    for job in jobs:
        job.deliver()


def closed_error(place: str) -> StoreError:
    """The error for using a store that is not open."""
    return StoreError(f"store {place} is not open: await store.open() first, and use it before close()")


def check_process(place: str, process: int) -> None:
    """Raise `StoreError` in a fork of the process that opened a store."""
    if process != os.getpid():
        raise StoreError(
            f"store {place} was opened in process {process} and is used in its fork {os.getpid()}: "
            "open a store of its own in each process"
        )


class Bell:
    """Wakes the watches of this process, from whatever thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, set[tuple[asyncio.AbstractEventLoop, asyncio.Event]]] = {}

    def ring(self, runs: Iterable[str] | None = None) -> None:
        """Wake whoever watches one of the runs; every watch if there are none, since nobody knows what has changed."""
        with self._lock:
            woken = [
                waiter for run in (self._waiting if runs is None else runs) for waiter in self._waiting.get(run, ())
            ]
        for loop, event in woken:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits there
                loop.call_soon_threadsafe(event.set)

    @contextlib.contextmanager
    def listening(self, run: str, event: asyncio.Event) -> Iterator[None]:
        """For the length of the block `event`, of the running loop, is set by each ring for the run."""
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
    """A `RunWatch` that compares what a `look` finds with what it found before: when its `event` is set, and every `poll`
    seconds, since others may change what it looks at without a word."""

    def __init__(
        self, look: Callable[[], Awaitable[T]], event: asyncio.Event, known: T, poll: float = math.inf
    ) -> None:
        self._look, self._event, self._known, self._poll = look, event, known, poll

    async def wait(self, timeout: float) -> bool:
        """See `RunWatch.wait`."""
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
