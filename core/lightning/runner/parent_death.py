"""Ties a process to its parent, so that nothing outlives the trainer.

The invariant: a process that called `die_with_parent` is gone soon after its parent is, however the parent died.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, how: signal.Signals) -> None:
    """Ask the kernel for the signal `how` when the parent dies; exit at once if `parent` is dead already.

    Linux only; elsewhere the closed socket is the only sign. The kernel watches the *thread* that forked this process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(how), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def kill_group(pid: int) -> None:
    """Kill the process group of a worker, also when the worker itself has just died."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # nobody is left; macOS says EPERM for a group of zombies
        return


def how_it_ended(status: int | None) -> str:
    """An exit status as `Popen.returncode` says it, in words."""
    if status is None:
        return "disappeared together with its fork server"
    if status < 0:
        try:
            return f"was killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"was killed by signal {-status}"
    return f"exited with code {status}"
