"""Counts and limits the requests that a run makes of models of others: judges, optimizers, providers.

The invariant: whoever makes such a request asks here before each, retries included, so that none is made beyond the limit. A
refused request is an error with the setting in it, never an empty answer or a reward of 0. One run at a time counts in a
process.
"""

from __future__ import annotations

import threading


class OutsideRequests:
    """The requests of the present run; its methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0
        """The requests that were made, since `begin` or, without it, since the process started."""
        self._limit: int | None = None
        self._setting = ""

    def begin(self, limit: int | None, setting: str, count: int = 0) -> None:
        """Count from `count` on, and refuse requests beyond `limit`; `setting` says where it is set; None sets no limit."""
        with self._lock:
            self.count, self._limit, self._setting = count, limit, setting

    def end(self) -> None:
        """Set no limit any more."""
        with self._lock:
            self._limit = None

    def refused(self, whose: str) -> str:
        """Count a request that is about to be made of `whose` model. Return "", or why it may not be made."""
        with self._lock:
            if self._limit is not None and self.count >= self._limit:
                return (
                    f"a request of {whose} was refused: the run has made {self.count:,} requests of models of others, and "
                    f"{self._setting}. Resume it with a larger budget"
                )
            self.count += 1
            return ""


OUTSIDE = OutsideRequests()
"""The requests of this process."""
