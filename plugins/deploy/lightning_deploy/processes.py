"""The processes of a deployment or a sweep: each writes to a log, and has its own process group.

The invariant: a process that does not end when told is killed with everything that it has started. A process is told to end
when its starter was killed (on Linux).
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from lightning.processes import die_with_parent

END_SECONDS = 60.0
"""Seconds that a process may take to save its work after it was told to end."""
Process = subprocess.Popen[bytes]


def start(command: Sequence[str], log: Path, env: Mapping[str, str]) -> Process:
    """Start a process whose output is appended to `log`. Ctrl-C does not reach it: its starter must end it. It gets SIGTERM
    when the thread that calls this has ended."""
    with log.open("ab") as said:
        return subprocess.Popen(  # noqa: S603 — ourselves, or a generated command, without a shell
            command,
            stdout=said,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=env,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),
        )


def kill(process: Process) -> None:
    """Kill a process and everything that it has started, as the loss of its machine would."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def end(processes: Sequence[Process]) -> None:
    """Tell all processes to end, and kill those that do not within `END_SECONDS`."""
    for process in processes:
        process.terminate()  # a training takes it like Ctrl-C; it works under nohup, too
    deadline = time.monotonic() + END_SECONDS
    for process in processes:
        try:
            process.wait(timeout=max(0.1, deadline - time.monotonic()))
        except (subprocess.TimeoutExpired, KeyboardInterrupt):  # a second Ctrl-C ends the waiting
            kill(process)


def last_words(log: Path) -> str:
    """Return the end of a process's log."""
    return log.read_text(encoding="utf-8", errors="replace").strip()[-600:]
