"""The event loop of everything that serves.

The invariant: servers, trainers, clients and what measures them run on one kind of loop, the fastest there is. An agent's own
process has asyncio's: what runs there is not ours. Async agents of the runner `inline` are in our process, on our loop.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from lightning.ending import until_told

T = TypeVar("T")


def new_loop() -> asyncio.AbstractEventLoop:
    """The fastest loop there is: uvloop has none for Windows and PyPy."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def run(main: Coroutine[Any, Any, T], *, instead: str = "await the coroutine") -> T:
    """`asyncio.run` on such a loop. Raises `RuntimeError`, which says what to do `instead`, where a loop runs already."""
    if is_inside():
        main.close()
        raise RuntimeError(
            f"an event loop runs in this thread already, as in a notebook or an async function: {instead}"
        )
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(main)


def is_inside() -> bool:
    """Whether a loop runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def run_to_end(main: Coroutine[object, object, T]) -> T:
    """Run a coroutine from ordinary code, also inside a notebook whose thread has a loop already.

    Outside a notebook SIGTERM ends it as Ctrl-C does: agents are stopped, leases returned, servers closed, then
    KeyboardInterrupt is raised.
    """
    return _run_beside(main) if is_inside() else run(until_told(main, signal.SIGTERM))


def _run_beside(main: Coroutine[object, object, T]) -> T:
    """Run a coroutine on a loop of its own in another thread; Ctrl-C here cancels it there and waits for its end."""
    finished: Future[T] = Future()
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]] = Future()

    async def watched() -> T:
        task = asyncio.create_task(main)
        started.set_result((asyncio.get_running_loop(), task))
        return await task

    def target() -> None:
        try:
            finished.set_result(run(watched()))
        except BaseException as error:  # noqa: BLE001 — carried over to the calling thread
            finished.set_exception(error)

    threading.Thread(target=target, name="lightning-trainer").start()
    try:
        return finished.result()
    except KeyboardInterrupt:
        loop, task = started.result()
        if not finished.done():
            loop.call_soon_threadsafe(task.cancel)
            finished.exception()
        raise
