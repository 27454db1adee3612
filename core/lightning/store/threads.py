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
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from lightning.asyncio_utils import new_loop
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


class _Work(WorkItem[T]):
    """A coroutine to run on the thread's loop."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        super().__init__()
        self.work = work
        self.task: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        """End it, on the thread's loop."""
        if self.task is not None:
            self.task.cancel()

    async def run(self) -> None:
        """Run it, unless its caller is gone."""
        if self.waiter.cancelled():
            return
        try:
            self.result = await self.work()
        except Exception as error:  # noqa: BLE001 — it belongs to the caller
            self.error = error


class LoopThread:
    """An event loop of its own. Loops are woken once for all jobs that came or ended together."""

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

    def ring(self, runs: Iterable[str]) -> None:
        """Wake whoever watches one of the runs."""
        with self._lock:
            woken = [waiter for run in runs for waiter in self._waiting.get(run, ())]
        for loop, event in woken:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits there
                loop.call_soon_threadsafe(event.set)

    def ring_all(self) -> None:
        """Wake every watch: nobody knows what has changed."""
        with self._lock:
            runs = list(self._waiting)
        self.ring(runs)

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
