"""Additions to asyncio: ending tasks, also the main one by a signal; running two coroutines of which one may fail; the choice
of the event loop, and its limit of open files.

The invariant: when a function that ends tasks returns, they have ended; the errors of tasks that it cancelled are ignored.
Servers, trainers, clients and measurements run on the fastest loop there is. An agent's own process has asyncio's loop, because
the code that runs there is the user's. Async agents of the runner `inline` are in our process, on our loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar, cast

log = logging.getLogger(__name__)

T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")

AGAIN = 0.1
"""Seconds until a task that has not ended is cancelled again."""
FILES = 65536
"""The number of open files, sockets among them, that a process asks the system for."""


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel the tasks until they have ended: for tasks that only listen and have no slow clean-up.

    One `cancel` is not always enough: before Python 3.12 `asyncio.wait_for` loses a cancellation that comes in the moment in
    which its awaitable is done.
    """
    while left := [task for task in tasks if not task.done()]:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=AGAIN)
    for task in tasks:
        if not task.cancelled():
            task.exception()


async def cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel the tasks once, and wait for their clean-up, however long: for tasks whose clean-up a second cancellation would
    spoil."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def unless(doing: Coroutine[Any, Any, T], over: Coroutine[Any, Any, object]) -> T | None:
    """Await a coroutine and return its result. If `over` ends first, cancel it, wait for its clean-up, and return None."""
    task, other = asyncio.create_task(doing), asyncio.create_task(over)
    try:
        await asyncio.wait({task, other}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        other.cancel()  # also if this is cancelled while `doing` cleans up
        await cancel(task)
        await end(other)


async def to_its_end(main: Coroutine[object, object, T]) -> T:
    """Await a coroutine wholly: a cancellation meanwhile is raised when it has ended. A second cancellation ends the wait, but
    not the coroutine."""
    task = asyncio.create_task(main)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


async def is_set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event, at most this many seconds. Return whether it is set."""
    # `asyncio.wait_for` may lose a cancellation on Python 3.11.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


async def one_by_one(first: Coroutine[object, object, A], second: Coroutine[object, object, B]) -> tuple[A, B]:
    """Await two coroutines one after the other. If the first fails, the second is never begun."""
    try:
        return await first, await second
    finally:
        second.close()


async def together(first: Coroutine[object, object, A], second: Coroutine[object, object, B]) -> tuple[A, B]:
    """Await two coroutines at once. If one fails, the other is stopped before the error is raised."""
    return cast("tuple[A, B]", tuple(await all_of([first, second])))


async def all_of(coroutines: Sequence[Coroutine[object, object, T]]) -> list[T]:
    """Await coroutines at once, a single one in the caller's task. If one fails, the others are stopped before the error is
    raised."""
    if len(coroutines) == 1:
        return [await coroutines[0]]
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel(*tasks)


async def until_told(main: Awaitable[T], *numbers: signal.Signals, gently: asyncio.Event | None = None) -> T:
    """Await `main` in the loop's main task. One of these signals cancels it, and KeyboardInterrupt is raised when it has ended.

    With `gently` the first signal only sets that event, after which `main` should end by itself; the second signal cancels it.
    """
    task, cancelled = asyncio.current_task(), False

    def told() -> None:
        nonlocal cancelled
        if gently is not None and not gently.is_set():
            gently.set()
        elif task is not None:
            cancelled = True
            task.cancel()

    loop = asyncio.get_running_loop()
    for number in numbers:
        # Windows has no such handlers, and only the main thread may set any: elsewhere a signal acts as before.
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(number, told)
    try:
        return await main
    except asyncio.CancelledError:
        if cancelled:
            raise KeyboardInterrupt from None
        raise


def new_loop() -> asyncio.AbstractEventLoop:
    """Make the fastest event loop there is: uvloop's, or asyncio's on Windows and PyPy, which uvloop does not support."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def run(main: Coroutine[Any, Any, T], *, instead: str = "await the coroutine") -> T:
    """Run a coroutine like `asyncio.run`, on a loop of `new_loop`. If a loop runs already, raises `RuntimeError`, which says
    what to do `instead`."""
    if is_inside():
        main.close()
        raise RuntimeError(
            f"an event loop runs in this thread already, as in a notebook or an async function: {instead}"
        )
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(main)


def is_inside() -> bool:
    """Whether an event loop runs in this thread."""
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


def outside_of_loops(function: Callable[[], T]) -> T:
    """Call a function where an event loop can be run: here, or in a new thread if this thread runs a loop."""
    if not is_inside():
        return function()
    with ThreadPoolExecutor(1, "lightning-agent") as pool:
        return pool.submit(contextvars.copy_context().run, function).result()


_UNWANTED: contextvars.ContextVar[threading.Event | None] = contextvars.ContextVar("lightning_unwanted", default=None)
LOOK_SECONDS = 0.2
"""Seconds between two checks whether the caller of `in_thread` still waits."""


async def in_thread(function: Callable[..., T], *arguments: object) -> T:
    """Run a function like `asyncio.to_thread`. If the call is cancelled, `while_wanted` in that thread notices."""
    unwanted = threading.Event()
    token = _UNWANTED.set(unwanted)
    try:
        return await asyncio.to_thread(function, *arguments)
    finally:
        unwanted.set()
        _UNWANTED.reset(token)


async def while_wanted(main: Coroutine[object, object, T]) -> T:
    """Await a coroutine inside a call of `in_thread`; cancel it when that call was cancelled: a process that is stopped waits
    for its threads."""
    unwanted, task = _UNWANTED.get(), asyncio.ensure_future(main)
    while not (await asyncio.wait({task}, timeout=LOOK_SECONDS if unwanted else None))[0]:
        if unwanted and unwanted.is_set():
            task.cancel()
    return task.result()


async def end_process(process: asyncio.subprocess.Process) -> None:
    """Kill a process if it still runs, close its pipes, which a child of it may hold open, and wait until it is gone: a
    transport that is left to the garbage collector warns in the middle of something else."""
    transport = process._transport  # type: ignore[attr-defined]  # noqa: SLF001 — there is no public way
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    for descriptor in range(3):
        if (pipe := transport.get_pipe_transport(descriptor)) is not None:
            pipe.close()
    await process.wait()
    transport.close()  # not before: it asks the system for the exit code, which asyncio then misses and takes for 255


def allow_many_files() -> None:
    """Raise the soft limit of open files to at most `FILES`: a thousand calls in flight are two thousand sockets."""
    try:
        import resource
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            log.debug("raised the limit of open files from %d to %d", soft, wanted)
