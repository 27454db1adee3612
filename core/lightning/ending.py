"""Ending asyncio tasks.

The invariant: when a function of this module returns, the tasks have ended; what they raised is not looked at.
"""

from __future__ import annotations

import asyncio
from typing import Any

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
