"""The end of processes: one that ends with its parent, and a whole group of processes.

The invariant: importing this costs nothing, since processes import it that must begin quickly.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, how: signal.Signals) -> None:
    """Ask the kernel for the signal `how` when the parent dies; exit at once if `parent` is dead already.

    Linux only; elsewhere this only looks whether the parent lives. The kernel watches the *thread* that made this process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(how), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def kill_group(pid: int) -> None:
    """Kill the process group that `pid` leads or led, also when that process has just died."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # nobody is left; macOS says EPERM for a group of zombies
        return
