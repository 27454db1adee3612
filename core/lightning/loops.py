"""The event loop of everything that serves.

The invariant: servers, trainers, clients and what measures them run on one kind of loop, the fastest there is. An agent's own
process has asyncio's: what runs there is not ours. Async agents of the runner `inline` are in our process, on our loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

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
