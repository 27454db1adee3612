"""Whether the clients in a cluster do well: what to tell, when to wait before making more, and when there can be none.

The invariant: a pod's end is counted once, and only when it was the client's own; a problem is logged once for all pods that
have it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass

from lightning.errors import RunnerError

from lightning_k8s.pods import PodView

logger = logging.getLogger(__name__)

_NAME = re.compile(r"lightning-\S+-[0-9a-f]{8}")
"""What the API calls a pod or a Job of ours, in whatever it says about it."""

SAY_AGAIN = 600.0
"""Seconds until a problem that goes on is told once more."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast things are looked at and tried again, in seconds.

    A client that failed after less than `settled` has crashed; after `crashes` rounds in which clients crashed and none did
    well, there can be none. Between rounds it waits twice `pause`, then twice as long, at most `longest`.
    """

    look: float = 5.0
    pause: float = 1.0
    longest: float = 60.0
    settled: float = 60.0
    crashes: int = 6


class Health:
    """Told of all pods at each look. `ever_ran` says whether a client ever ran; `not_before` is when more may be made."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._running_since: dict[str, float] = {}
        self._buried: set[str] = set()
        self._told: dict[str, float] = {}
        self._rounds = 0
        self.ever_ran, self.not_before = False, 0.0
        self.last_problem = "the cluster gave no reason"

    def look(self, pods: Sequence[PodView], now: float) -> None:
        """Take in how the pods are. Raises `RunnerError` when there can be no client."""
        crashed = False
        for pod in pods:
            if pod.running:
                self.ever_ran = True
                if now - self._running_since.setdefault(pod.name, now) >= self._pace.settled:
                    self._rounds = 0
            if pod.name not in self._buried:
                if pod.problem:
                    self.tell(pod.problem, now, f"the runner pod {pod.name} {_what(pod)}: ")
                crashed |= pod.ended and self._bury(pod, now)
        known = {pod.name for pod in pods}
        self._buried &= known
        self._running_since = {name: at for name, at in self._running_since.items() if name in known}
        if not self.ever_ran and any(pod.hopeless for pod in pods):
            raise RunnerError(f"no runner pod can start: {self.last_problem}")
        if crashed and now >= self.not_before:
            self._crashed(now, any(pod.running for pod in pods))

    def tell(self, problem: str, now: float, whose: str = "") -> None:
        """Log a problem; the same one of another pod only after a while."""
        self.last_problem = whose + problem
        self._told = {text: at for text, at in self._told.items() if now - at < SAY_AGAIN}
        alike = _NAME.sub("", problem)
        if alike not in self._told:
            self._told[alike] = now
            logger.warning("%s", self.last_problem)

    def pause(self, seconds: float, now: float) -> None:
        """Make nothing for so long."""
        self.not_before = max(self.not_before, now + seconds)

    def _bury(self, pod: PodView, now: float) -> bool:
        """Whether its client crashed."""
        self._buried.add(pod.name)
        if pod.done:
            self.ever_ran, self._rounds = True, 0
        return pod.crashed and now - self._running_since.get(pod.name, now) < self._pace.settled

    def _crashed(self, now: float, others_run: bool) -> None:
        self._rounds += 1
        self.pause(min(self._pace.longest, self._pace.pause * 2**self._rounds), now)
        if self._rounds >= self._pace.crashes and not others_run:
            raise RunnerError(f"the runner pods end as soon as they start; the last one: {self.last_problem}")


def _what(pod: PodView) -> str:
    if pod.ended:
        return "failed"
    return "runs, but" if pod.running else "does not start"
