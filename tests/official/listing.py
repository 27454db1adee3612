"""The list of programs (`programs.toml`): which, from where, and who is expected to call how often.

The invariant: a program of others comes from a source distribution whose digest stands in the list, one of ours from
`tests/official/programs`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
OURS = HERE / "programs"
CACHE = HERE.parents[1] / ".official"
"""Source distributions and environments; git ignores it."""


@dataclass(frozen=True)
class Source:
    """A source distribution: name and version as the package index has them, and the SHA-256 of the file."""

    name: str
    version: str
    sha256: str

    @property
    def folder(self) -> Path:
        """Where it is unpacked."""
        return CACHE / "sources" / f"{self.name}-{self.version}"


@dataclass(frozen=True)
class Program:
    """A program.

    `callers` are the paths of those who call, with how often; `unnamed` says that no adapter names them. `not_tools`
    are names of functions that the model calls and that are no tools (a handoff, an answer's form); `untold` says why
    nothing tells of its tools. `venv` is the environment that it runs in, one that is `pinned` runs also in the
    project's own; `preload` are modules that are imported once for all programs of the framework, and a `module` is
    run as `python -m` does. `refused` calls are refused, and `raises` is in the error that it ends with; `why` has
    the reason of both.
    """

    framework: str
    path: str
    source: str = ""
    venv: str = "newest"
    distribution: str = ""
    pinned: bool = False
    preload: Sequence[str] = ()
    callers: Mapping[str, int] = field(default_factory=dict)
    not_tools: Sequence[str] = ()
    untold: str = ""
    unnamed: bool = False
    input: Sequence[str] = ()
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    module: bool = False
    refused: int = 0
    raises: str = ""
    why: str = ""

    @property
    def name(self) -> str:
        """Its short name, unique in the list."""
        return f"{self.source}/{self.path}" if self.source else self.path


@dataclass(frozen=True)
class Listing:
    """All of it. `venvs` are environments of their own, with what is installed in each."""

    sources: Mapping[str, Source]
    venvs: Mapping[str, Sequence[str]]
    programs: Sequence[Program]

    def place(self, program: Program) -> tuple[Path, list[str]]:
        """The program's file, and the folders that it expects on its path."""
        if not program.source:
            return OURS / program.path, []
        folder = self.sources[program.source].folder
        return folder / program.path, [str(folder)]


def load(path: Path = HERE / "programs.toml") -> Listing:
    """Read the list."""
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    defaults: Mapping[str, Mapping[str, Any]] = data.get("frameworks", {})
    programs = [Program(**{**defaults.get(one["framework"], {}), **one}) for one in data["programs"]]
    return Listing(
        {name: Source(name, **rest) for name, rest in data.get("sources", {}).items()}, data.get("venvs", {}), programs
    )
