"""What a pod's status says, in words: does its client run, has it ended, and what is wrong with it.

The invariant: these are pure functions of what the API says; a field that is absent means nothing is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

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
"""What to do about the reasons that the kubelet gives."""

_HOPELESS = {"InvalidImageName", "ErrImageNeverPull"}
"""Reasons that no waiting cures."""

_ELSEWHERE = {"Evicted", "NodeLost", "NodeShutdown", "Shutdown", "Terminated", "Preempting", "NodeAffinity"}
"""Reasons of a pod's end that say nothing about its client: the node was taken away."""


@dataclass(frozen=True, slots=True)
class PodView:
    """One pod. `problem` is empty while nothing is wrong; `crashed` says that the client itself ended, or could not start."""

    name: str
    running: bool = False
    ended: bool = False
    leaving: bool = False
    crashed: bool = False
    hopeless: bool = False
    problem: str = ""

    @property
    def done(self) -> bool:
        """Whether its client ended well."""
        return self.ended and not self.problem

    @property
    def living(self) -> bool:
        """Whether it runs its client, or is going to."""
        return not self.ended and not self.leaving


def view(pod: Object) -> PodView:
    """A pod as the API says it."""
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
    """The end of a container, or what it waits for: reason, exit code, message (the end of its log) and cure."""
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
    """Whether a Job is over, one way or the other, or being deleted."""
    status = job.get("status") or {}
    over = any(_condition(status, kind, "True") for kind in ("Complete", "Failed"))
    return over or "deletionTimestamp" in job["metadata"]


def job_problem(job: Object) -> str:
    """Why a Job failed; empty when it did not."""
    failed = _condition(job.get("status") or {}, "Failed", "True")
    return "" if failed is None else f"{failed.get('reason', '')}: {failed.get('message', '')}"
