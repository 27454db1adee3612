"""No process of a policy server outlives the one that started it, however that one ended.

The invariant holds in three ways, each for the process the others cannot reach: the server polls whether its parent is
still there and ends its whole group when not; the engine process asks the kernel to be killed with the server; and
whoever starts a server kills its group when it stops it.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time

OWNED = "LIGHTNING_OWNED_SERVER"
"""Environment variable of a server that has an owner: the pid of the owner."""
POLL_SECONDS = 0.5
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process, one that multiprocessing started, when its parent is gone (Linux).

    The kernel's promise is tied to the *thread* that started us, which for vLLM's engine is the server's main thread.
    The server itself may have been started from a short-lived thread, and uses `watch_owner` instead. Does nothing in a
    process that multiprocessing did not start.
    """
    parent = multiprocessing.parent_process()
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent.pid:  # it ended before we could ask
        os.kill(os.getpid(), signal.SIGKILL)


def watch_owner(owner: int) -> threading.Thread:
    """Kill this process's whole group as soon as `owner` is no longer its parent; start this once, as group leader."""
    thread = threading.Thread(target=_wait_and_kill, args=(owner,), name="lightning-owner", daemon=True)
    thread.start()
    return thread


def _wait_and_kill(owner: int) -> None:
    while os.getppid() == owner:
        time.sleep(POLL_SECONDS)
    os.killpg(os.getpgrp(), signal.SIGKILL)
