"""Ending asyncio tasks, and the main one by a signal.

The invariant: when a function of this module returns, the tasks have ended; what those raised that it was told to end is not
looked at.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")

AGAIN = 0.1
"""Seconds until a task that has not ended is cancelled once more."""


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel the tasks until they have ended: for those that only listen, and have nothing to tidy up that takes time.

    One `cancel` is not enough for them everywhere: before Python 3.12 `asyncio.wait_for` loses a cancellation that comes in
    the moment in which what it waits for is done.
    """
    while left := [task for task in tasks if not task.done()]:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=AGAIN)
    for task in tasks:
        if not task.cancelled():
            task.exception()


async def cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel the tasks once, and wait however long they tidy up: for those whose tidying a second cancellation would spoil."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def until_told(main: Awaitable[T], *numbers: signal.Signals, gently: asyncio.Event | None = None) -> T:
    """Await `main` in the loop's main task; one of these signals cancels it, and KeyboardInterrupt is raised when it has ended.

    With `gently` the first signal sets that event and nothing else: `main` is to end by itself then, and the second cancels it.
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
        # Windows has no such handlers, and a thread that is not the main one may set none: there a signal stays what it was.
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(number, told)
    try:
        return await main
    except asyncio.CancelledError:
        if cancelled:
            raise KeyboardInterrupt from None
        raise
