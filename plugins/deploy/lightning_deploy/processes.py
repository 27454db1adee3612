"""Processes of a deployment or a sweep: each writes to a log, and is in a group of its own.

The invariant: one that is told to end and does not is killed with all that it has started.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

END_SECONDS = 60.0
"""How long a process that is told to end may take to write what it has."""
Process = subprocess.Popen[bytes]


def start(command: Sequence[str], log: Path, env: Mapping[str, str]) -> Process:
    """Start a process; what it says is added to `log`. Ctrl-C does not reach it: whoever started it ends it."""
    with log.open("ab") as said:
        return subprocess.Popen(  # noqa: S603 — ourselves, or a generated command, without a shell
            command, stdout=said, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env, start_new_session=True
        )


def kill(process: Process) -> None:
    """Kill it as a lost machine would be, with all that it has started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def end(processes: Sequence[Process]) -> None:
    """Tell all to end, and kill those that do not."""
    for process in processes:
        process.terminate()  # as Ctrl-C to a training, and heard below nohup, too
    deadline = time.monotonic() + END_SECONDS
    for process in processes:
        try:
            process.wait(timeout=max(0.1, deadline - time.monotonic()))
        except (subprocess.TimeoutExpired, KeyboardInterrupt):  # a second Ctrl-C waits no longer
            kill(process)


def last_words(log: Path) -> str:
    """The end of what a process said."""
    return log.read_text(encoding="utf-8", errors="replace").strip()[-600:]
