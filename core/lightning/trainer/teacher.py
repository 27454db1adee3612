"""The teacher that a step was taken with: which model it is, and the digest of its files.

The invariant: a teacher is known by the digest of its weights. A step is taken, and taken again, with that one or not at all.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lightning.engines.protocol import Engine
from lightning.errors import ConfigError
from lightning.types import Json

TEACHER: Final = "teacher"
"""The key of a step's context that names the teacher, and the folder in a run's own of teachers that were a run's step."""


@dataclass(frozen=True, slots=True)
class Teacher:
    """The model of a `folder`, as it was asked for (`name`), and `base_digest` of it."""

    name: str
    folder: Path
    digest: str

    def described(self) -> dict[str, Json]:
        """For the context of a step."""
        return {"name": self.name, "model": str(self.folder), "sha256": self.digest}


def reference_of(engine: Engine, teacher: Teacher | None) -> dict[str, Path]:
    """What the engine's `open` is told of a teacher. Raises `ConfigError` for an engine that knows of none."""
    if teacher is None:
        return {}
    known = inspect.signature(engine.open).parameters.values()
    if not any(one.name == "reference" or one.kind is one.VAR_KEYWORD for one in known):
        raise ConfigError(
            f"the engine {type(engine).__name__} takes no teacher (its `open` has no `reference`), and the algorithm learns "
            f"from {teacher.name}: take another engine (the torch engine takes one), or another algorithm"
        )
    return {"reference": teacher.folder}
