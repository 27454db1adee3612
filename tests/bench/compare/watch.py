"""What a program costs, seen from outside: CPU-seconds of its whole process tree over time.

The invariant: a process that ended still counts, in the time of the parent that waited for it, so the curve never falls.
"""

from __future__ import annotations

import resource
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
import psutil

POLL_SECONDS = 0.25


def tree_cpu(root: psutil.Process) -> float:
    """CPU-seconds (user and system) of a process, its living descendants, and those of them that were waited for."""
    total = 0.0
    for process in [root, *root.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


@dataclass
class Meter:
    """Follows one process tree until it is stopped. `times` are Unix seconds, `cpu` the CPU-seconds used by then."""

    pid: int
    times: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._root = psutil.Process(self.pid)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="meter", daemon=True)
        self.read()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.read()

    def read(self) -> None:
        """Take one reading now, if the process still lives."""
        try:
            used = tree_cpu(self._root)
        except psutil.NoSuchProcess:
            return
        self.times.append(time.time())
        self.cpu.append(max(used, self.cpu[-1] if self.cpu else 0.0))

    def at(self, moment: float) -> float:
        """CPU-seconds used by a moment, interpolated."""
        return float(np.interp(moment, self.times, self.cpu))

    def _follow(self) -> None:
        while not self._over.wait(POLL_SECONDS):
            self.read()


def _waited_for() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_watched(command: Sequence[str], *, env: Mapping[str, str], log: Path) -> tuple[Meter, float]:
    """Run a program to its end and return its meter and the Unix time of its start.

    Raises `RuntimeError` with the last lines of its log when it fails.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        began, before = time.time(), _waited_for()
        process = subprocess.Popen(command, env=dict(env), stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            with Meter(process.pid) as meter:
                code = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
    # What was used since the last reading: the kernel counts a process and its children when they have been waited for.
    meter.times.append(time.time())
    meter.cpu.append(max(meter.cpu[-1], _waited_for() - before))
    if code:
        tail = "\n".join(f"  | {line}" for line in log.read_text(errors="replace").splitlines()[-25:])
        raise RuntimeError(f"{' '.join(command)} ended with {code}. The last lines of {log}:\n{tail}")
    return meter, began
