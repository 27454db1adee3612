"""Ending a task for certain.

The invariant: when `end` returns the task has ended. One `cancel` is not enough everywhere: before Python 3.12
`asyncio.wait_for` loses a cancellation that comes in the moment in which what it waits for is done.
"""

from __future__ import annotations

import asyncio
from typing import Any

AGAIN = 0.1
"""Seconds until a task that has not ended is cancelled once more."""


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel the tasks until they have ended; what they raised is not looked at."""
    while left := [task for task in tasks if not task.done()]:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=AGAIN)
    for task in tasks:
        if not task.cancelled():
            task.exception()
