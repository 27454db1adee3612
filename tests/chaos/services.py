"""Processes that are killed and started again, as a supervisor (systemd, Kubernetes) would."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil


@dataclass
class Service:
    """One command, in a session of its own. `starts` counts how often it was started."""

    name: str
    command: Sequence[str]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    again: Sequence[str] = ()
    """Arguments that every start but the first gets."""
    starts: int = 0
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, unless it runs."""
        if self.process is not None and self.process.poll() is None:
            return
        command = [*self.command, *(self.again if self.starts else ())]
        with self.log.open("ab") as log:
            log.write(f"\n=== start {self.starts}\n".encode())
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **self.env},
                start_new_session=True,
            )
        self.starts += 1

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        """`kill -9` of the process itself; what it started must see to its own end."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def children(self, word: str) -> list[psutil.Process]:
        """The descendants whose command line has the word."""
        if not self.alive or self.process is None:
            return []
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if word in " ".join(child.cmdline()):
                    found.append(child)
            except psutil.Error:
                continue
        return found

    def stop(self, seconds: float = 90) -> int | None:
        """SIGTERM, then wait; what does not end is killed with its whole session. The exit status, None if it was killed."""
        if self.process is None:
            return None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            return None
