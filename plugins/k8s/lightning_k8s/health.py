"""What a pod's status means, in words; and the health of the clients in a cluster: which problems to log, when to wait before
more clients are created, and when no client can run.

The invariant: pure functions read a pod from the API's JSON, where an absent field means that nothing is known. A pod's end
counts once, and only if the client itself ended; a problem is logged once for all pods that have it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning.errors import RunnerError

from lightning_k8s.cluster import Object

_IMAGE = "Check runner.k8s.image (or the template's), and runner.k8s.image_pull_secrets"
_NO_COMMAND = (
    "Check that the image has the `lightning` command, by the wheel that `make dist` builds in lightning's checkout"
)
_CURES = {
    "ErrImagePull": _IMAGE,
    "ImagePullBackOff": _IMAGE,
    "InvalidImageName": _IMAGE,
    "ErrImageNeverPull": _IMAGE,
    "CreateContainerConfigError": "Check the Secrets and ConfigMaps that the template names",
    "CreateContainerError": "Check the template's volumes and security context",
    "RunContainerError": _NO_COMMAND,
    "StartError": _NO_COMMAND,
    "CrashLoopBackOff": "An init container of the template fails",
    "OOMKilled": "Raise runner.k8s.limits.memory, or lower runner.concurrency or raise runner.k8s.pods",
}
"""Cures for the reasons that the kubelet gives."""

_HOPELESS = {"InvalidImageName", "ErrImageNeverPull"}
"""Reasons that waiting cannot cure."""

_ELSEWHERE = {"Evicted", "NodeLost", "NodeShutdown", "Shutdown", "Terminated", "Preempting", "NodeAffinity"}
"""Reasons of a pod's end that are not the client's fault: the node was taken away."""


@dataclass(frozen=True, slots=True)
class PodView:
    """The state of a pod. `problem` is empty while nothing is wrong; `hopeless` says that waiting cannot cure the problem.
    `crashed` says that the client itself ended, or could not start."""

    name: str
    running: bool = False
    ended: bool = False
    leaving: bool = False
    crashed: bool = False
    hopeless: bool = False
    problem: str = ""

    @property
    def done(self) -> bool:
        """Whether the client ended without a problem."""
        return self.ended and not self.problem

    @property
    def living(self) -> bool:
        """Whether the pod runs its client, or is going to."""
        return not self.ended and not self.leaving


def view(pod: Object) -> PodView:
    """Return the state of a pod from the API's JSON."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    name, phase = metadata["name"], status.get("phase", "Pending")
    leaving = "deletionTimestamp" in metadata or phase == "Unknown"
    if phase in ("Succeeded", "Failed"):
        reason = status.get("reason", "")
        elsewhere = reason in _ELSEWHERE or _condition(status, "DisruptionTarget", "True") is not None
        problem = "" if phase == "Succeeded" else _how_it_failed(status)
        return PodView(name, ended=True, leaving=leaving, crashed=phase == "Failed" and not elsewhere, problem=problem)
    waiting = [state for state in _states(status, "waiting") if state.get("reason") in _CURES]
    problem = "; ".join(_reason(state) for state in waiting)
    unscheduled = _condition(status, "PodScheduled", "False")
    if not problem and unscheduled is not None:
        problem = (
            f"no node takes it: {unscheduled.get('message') or unscheduled.get('reason', '')}. Add nodes, or change "
            "runner.k8s.requests or .node_selector"
        )
    hopeless = any(state["reason"] in _HOPELESS for state in waiting)
    running = phase == "Running" and not waiting
    return PodView(name, running=running, leaving=leaving, hopeless=hopeless, problem=problem)


def _how_it_failed(status: Mapping[str, Any]) -> str:
    ends = [state for state in _states(status, "terminated") if state.get("exitCode")]
    said = [_reason(state) for state in ends]
    if status.get("reason") or not said:
        said.insert(0, f"{status.get('reason') or 'it failed'}: {status.get('message') or 'no reason was given'}")
    return "; ".join(said)


def _reason(state: Mapping[str, Any]) -> str:
    """Return why a container ended or waits: reason, exit code, message (the end of its log) and cure."""
    reason = state.get("reason", "")
    code = f" (exit code {state['exitCode']})" if state.get("exitCode") else ""
    message = str(state.get("message") or "").strip()
    cure = _CURES.get(reason, "")
    return f"{reason}{code}{': ' if message else ''}{message[-1500:]}{'. ' if cure else ''}{cure}"


def _states(status: Mapping[str, Any], which: str) -> Iterator[Mapping[str, Any]]:
    for group in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(group) or ():
            state = (container.get("state") or {}).get(which)
            if state:
                yield state


def _condition(status: Mapping[str, Any], kind: str, value: str) -> Mapping[str, Any] | None:
    found = (item for item in status.get("conditions") or () if item["type"] == kind and item["status"] == value)
    return next(found, None)


def job_ended(job: Object) -> bool:
    """Whether a Job has completed, has failed, or is being deleted."""
    status = job.get("status") or {}
    over = any(_condition(status, kind, "True") for kind in ("Complete", "Failed"))
    return over or "deletionTimestamp" in job["metadata"]


def job_problem(job: Object) -> str:
    """Return why a Job failed; empty when it did not."""
    failed = _condition(job.get("status") or {}, "Failed", "True")
    return "" if failed is None else f"{failed.get('reason', '')}: {failed.get('message', '')}"


logger = logging.getLogger(__name__)

_NAME = re.compile(r"lightning-\S+-[0-9a-f]{8}")
"""The name of a pod or Job of ours in a message of the API."""

SAY_AGAIN = 600.0
"""Seconds until a lasting problem is logged again."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How often clients are looked at and created again, in seconds.

    A client that failed within `settled` seconds has crashed. After `crashes` rounds with crashes and without a success no
    client can run. The first pause between rounds is twice `pause`; it then doubles, up to `longest`.
    """

    look: float = 5.0
    pause: float = 1.0
    longest: float = 60.0
    settled: float = 60.0
    crashes: int = 6


class Health:
    """Judges the health of the clients from all pods, at each look. `ever_ran` says whether a client ever ran; before
    `not_before` no more clients may be created."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._running_since: dict[str, float] = {}
        self._buried: set[str] = set()
        self._told: dict[str, float] = {}
        self._rounds = 0
        self.ever_ran, self.not_before = False, 0.0
        self.last_problem = "the cluster gave no reason"

    def look(self, pods: Sequence[PodView], now: float) -> None:
        """Note the states of the pods. Raises `RunnerError` when no client can run."""
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
        """Log a problem; the same problem of another pod is logged only after `SAY_AGAIN` seconds."""
        self.last_problem = whose + problem
        self._told = {text: at for text, at in self._told.items() if now - at < SAY_AGAIN}
        alike = _NAME.sub("", problem)
        if alike not in self._told:
            self._told[alike] = now
            logger.warning("%s", self.last_problem)

    def pause(self, seconds: float, now: float) -> None:
        """Create no clients for this many seconds."""
        self.not_before = max(self.not_before, now + seconds)

    def _bury(self, pod: PodView, now: float) -> bool:
        """Count a pod's end, and return whether its client crashed."""
        self._buried.add(pod.name)
        if pod.done:
            self.ever_ran, self._rounds = True, 0
        return pod.crashed and now - self._running_since.get(pod.name, now) < self._pace.settled

    def _crashed(self, now: float, others_run: bool) -> None:
        self._rounds += 1
        self.pause(min(self._pace.longest, self._pace.pause * 2**self._rounds), now)
        if self._rounds >= self._pace.crashes and not others_run:
            raise RunnerError(f"the runner pods end as soon as they start; the last problem: {self.last_problem}")


def _what(pod: PodView) -> str:
    if pod.ended:
        return "failed"
    return "runs, but" if pod.running else "does not start"
