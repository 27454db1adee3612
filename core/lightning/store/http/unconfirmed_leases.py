"""Leases that were asked for until the caller's patience was over: a server may have given them all the same.

The invariant: an id goes to one request at a time, so that what was given under it is not handed out twice.
"""

from __future__ import annotations

import threading

from lightning.store.messages import LeaseRequest


class Unheard:
    """The requests of one store, with the ids that they were sent under; they may be of any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[tuple[LeaseRequest, str]] = []

    def take(self, run: str, worker: str, limit: int) -> tuple[LeaseRequest, str] | None:
        """A request of this worker for no more than `limit` rollouts, to be sent again now; None when there is none."""
        with self._lock:
            for place, (asked, _) in enumerate(self._kept):
                if (asked.run, asked.worker) == (run, worker) and asked.limit <= limit:
                    return self._kept.pop(place)
        return None

    def keep(self, asked: LeaseRequest, once: str) -> None:
        """Remember a request that was not answered."""
        if asked.limit:
            with self._lock:
                self._kept.append((asked, once))

    def forget(self, worker: str) -> None:
        """The worker has given back whatever it was given."""
        with self._lock:
            self._kept = [kept for kept in self._kept if kept[0].worker != worker]
