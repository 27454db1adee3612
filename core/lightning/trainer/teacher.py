"""The teacher that a step was taken with: which model it is, and the digest of its files.

The invariant: a teacher is known by the digest of its weights. A step is taken, and taken again, with that one or not at all.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from lightning.engines.protocol import Engine
from lightning.errors import ConfigError
from lightning.trainer.context import base_digest
from lightning.types import Json, StepRecord

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


def recorded_teacher(record: StepRecord) -> Teacher | None:
    """The teacher that a step was taken with."""
    found = record.context.get(TEACHER)
    if not isinstance(found, Mapping):
        return None
    return Teacher(str(found.get("name")), Path(str(found.get("model"))), str(found.get("sha256")))


def teacher_again(recorded: Teacher, here: Teacher | None, run: Path | None = None) -> Teacher:
    """The teacher of a step that is to be taken again: the one that is `here`, where it is the same, or that in its folder,
    which may have moved with that of the `run`. Raises `ConfigError` where its files are gone, or are another's."""
    if here is not None and here.digest == recorded.digest:
        return here
    places = [recorded.folder, *([] if run is None else [run / TEACHER / recorded.folder.name])]
    found = [folder for folder in places if (folder / "config.json").is_file()]
    for folder in found:
        if base_digest(folder) == recorded.digest:
            return replace(recorded, folder=folder)
    if found:
        problem = f"and the files in {found[0]} are another model's by now: bring back those that it had"
    else:
        problem = f"which is not at {recorded.folder} any more: bring it back there"
    raise ConfigError(
        f"the step was taken with the teacher {recorded.name} (SHA-256 {recorded.digest[:12]}...), {problem}"
    )


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
