"""Waits a moment before a step of vLLM's engine while the machine's cores are busy, so that more requests share the step.

The invariant: a step waits only while other processes could use every core, and never longer than `LONGEST`. The wait changes
when a token is sampled, and not which one.

On a CPU a step of a small model takes only about twice as long for sixteen requests as for one, because calls to kernels take
the time. The engine shares its cores with the agents, the gateway and vLLM's HTTP server, which bring it its requests. An
engine that begins at once therefore takes time from them for a step with one or two requests (docs/benchmarks.md has the
measurement).
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

AT_ONCE = "LIGHTNING_GATHER"
"""Environment variable of an owned server: how many requests its agents send at once. Absent, empty or below `LEAST`: no step
waits."""
LEAST = 16
"""Requests at once from which on a step waits: with few agents, few requests can come meanwhile."""
LONGEST = 0.03
"""The most seconds that a step waits."""
PAUSE = 0.005
"""Seconds between two looks at the machine."""
LOAD = "/proc/loadavg"
"""The file in which Linux says how many tasks run or wait for a core of the machine."""


@dataclass(frozen=True, slots=True)
class Gathering:
    """Lets steps wait, where `at_once` requests run at once, on a machine of `cores` cores. `load` is the open `LOAD`."""

    at_once: int
    cores: int
    load: int

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ, load: str = LOAD) -> Self | None:
        """Return one as the environment says; None if no step is to wait, or nothing says how busy the machine is."""
        asked = environment.get(AT_ONCE, "")
        if not asked.isdigit() or int(asked) < LEAST:
            return None
        try:
            return cls(int(asked), os.cpu_count() or 1, os.open(load, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            return None

    def busy(self) -> bool:
        """Whether tasks other than this thread could use every core now."""
        runnable = os.pread(self.load, 128, 0).split()[3].partition(b"/")[0]
        return int(runnable) > self.cores

    def wait(self, running: int) -> None:
        """Sleep before a step with `running` requests, while fewer than half of all are in the step and the cores are busy. The
        engine's other threads read requests and send answers meanwhile."""
        if 2 * running >= self.at_once:
            return
        until = time.monotonic() + LONGEST
        while self.busy() and time.monotonic() < until:
            time.sleep(PAUSE)
