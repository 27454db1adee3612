"""A finding of `lightning doctor`, and the process in which one is looked for that takes long or may crash."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Literal, TypeAlias

Status: TypeAlias = Literal["ok", "missing", "broken", "low"]


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `needed` means that `lightning demo` cannot run unless it is ok."""

    name: str
    status: Status
    detail: str
    cure: str = ""
    needed: bool = False

    @property
    def fatal(self) -> bool:
        """Whether `lightning demo` cannot run because of this."""
        return self.needed and self.status != "ok"


class ProbeError(Exception):
    """Why something could not be found out. `log` is all that was written about it."""

    def __init__(self, reason: str, log: str = "") -> None:
        super().__init__(reason)
        self.log = log


def probe(module: str, *arguments: str, seconds: float) -> dict[str, object]:
    """What a module finds that is run in a process of its own: the JSON object of its last line of output.

    Raises `ProbeError` with the last line of what it wrote to standard error.
    """
    command = [sys.executable, "-P", "-m", module, *arguments]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)  # noqa: S603 — ours
    except subprocess.TimeoutExpired as error:
        raise ProbeError(f"it took more than {seconds:.0f} s") from error
    if ran.returncode:
        lines = [line for line in ran.stderr.splitlines() if line.strip()]
        raise ProbeError(lines[-1][:300] if lines else f"exit code {ran.returncode}", ran.stderr)
    answer: dict[str, object] = json.loads(ran.stdout.splitlines()[-1])
    return answer
