"""How a thread that learned of a change wakes the tasks that watch for it, on whatever loops they wait.

The invariant: whoever listens for a run is woken by each ring for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterable, Iterator


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
