"""The teacher that a run distills: which model it is, that its tokens are the student's, and the digest of its files.

The invariant: a teacher is known by the digest of its weights. A step is taken, and taken again, with that one or not at all;
a model whose tokens mean something else is refused before anything is started.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightning.algorithms.protocol import teacher_of
from lightning.engines.protocol import ChecksTeacher, Engine
from lightning.errors import ConfigError, EngineError, MissingExtraError
from lightning.losses.protocol import needs_reference
from lightning.trainer.context import base_digest
from lightning.types import Json, StepRecord

if TYPE_CHECKING:
    from lightning.trainer.algorithm import AlgorithmSchedule

logger = logging.getLogger(__name__)

TEACHER: Final = "teacher"
"""The key of a step's context that names the teacher, and the folder in a run's own of teachers that were a run's step."""
SHOWN: Final = 3
"""Tokens that an error names at most."""
_TOKENIZERS = ("*token*", "vocab*", "*.model", "merges.txt", "tekken.json")
"""Files of which every tokenizer has one. Without any, `transformers` makes an empty tokenizer up."""


@dataclass(frozen=True, slots=True)
class Teacher:
    """The model of a `folder`, as it was asked for (`name`), and `base_digest` of it."""

    name: str
    folder: Path
    digest: str

    def described(self) -> dict[str, Json]:
        """For the context of a step."""
        return {"name": self.name, "model": str(self.folder), "sha256": self.digest}


def teacher_named(schedule: AlgorithmSchedule) -> str:
    """The teacher that the algorithms ask for; empty for none. Raises `ConfigError` where they want several reference models,
    of which an engine has one."""
    algorithms = [algorithm for _, algorithm in schedule.phases]
    names = sorted({name for algorithm in algorithms if (name := teacher_of(algorithm))})
    if len(names) > 1:
        raise ConfigError(
            f"a run has one teacher, and the schedule has {' and '.join(names)}: begin another run with the weights of the "
            "first (--from RUN@STEP)"
        )
    others = [other.name for other in algorithms if names and not teacher_of(other) and needs_reference(other.loss)]
    if others:
        raise ConfigError(
            f"{others[0]} compares with the model that training began with, and in this schedule the reference model is the "
            f"teacher {names[0]}: leave the KL penalty out, or begin another run for it (--from RUN@STEP)"
        )
    return names[0] if names else ""


def recorded_teacher(record: StepRecord) -> Teacher | None:
    """The teacher that a step was taken with."""
    found = record.context.get(TEACHER)
    if not isinstance(found, Mapping):
        return None
    return Teacher(str(found.get("name")), Path(str(found.get("model"))), str(found.get("sha256")))


def check_unchanged(teacher: Teacher, records: Sequence[StepRecord]) -> None:
    """Raise `ConfigError` where the last step that was taken with a teacher of this name had one of other weights."""
    taught = (found for record in reversed(records) if (found := recorded_teacher(record)) is not None)
    before = next((found for found in taught if found.name == teacher.name), None)
    if before is not None and before.digest != teacher.digest:
        raise ConfigError(
            f"the teacher {teacher.name} in {teacher.folder} is another model than it was (SHA-256 {teacher.digest[:12]}..., "
            f"and {before.digest[:12]}... in the steps that were taken): bring back the files that it had, or give the other "
            "model by another name, with which a config epoch of its own begins"
        )


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


def check_teacher(engine: Engine, teacher: Teacher) -> None:
    """Refuse a teacher that the engine cannot have beside the trained model, while nothing is started. Raises `ConfigError`."""
    reference_of(engine, teacher)
    if isinstance(engine, ChecksTeacher):
        try:
            engine.check_teacher(teacher.folder)
        except EngineError as error:
            raise ConfigError(f"the teacher {teacher.name} cannot be loaded: {error}") from error


def check_same_tokens(student: Path, teacher: Path) -> None:
    """Refuse a teacher whose tokens are not the student's. Raises `ConfigError` naming what differs."""
    ours, theirs = _tokenizer(student), _tokenizer(teacher)
    own, other = ours.get_vocab(), theirs.get_vocab()
    different = sorted((index, token) for token, index in own.items() if other.get(token) != index)
    if different or len(own) != len(other):
        extra = sorted((index, token) for token, index in other.items() if token not in own)
        told = [
            f"{token!r} is {index} to the student and {other.get(token, 'nothing')} to the teacher"
            for index, token in different
        ]
        told += [f"{token!r} is {index} to the teacher and nothing to the student" for index, token in extra]
        more = f", and {len(told) - SHOWN} more" if len(told) > SHOWN else ""
        raise ConfigError(
            f"the teacher in {teacher} has another vocabulary than the student in {student} ({len(other)} tokens, not "
            f"{len(own)}: {'; '.join(told[:SHOWN])}{more}), so that its logprobs would be of other texts: take a teacher of "
            "the student's family"
        )
    rows, needed = _vocab_size(teacher), _vocab_size(student)
    if rows < needed:
        raise ConfigError(
            f"the teacher in {teacher} has logits for {rows} token ids and the student in {student} for {needed}: it cannot "
            "say how likely the others are. Take a teacher of the student's family"
        )
    if ours.eos_token != theirs.eos_token:
        logger.warning(
            "the student ends an answer with %s and the teacher in %s with %s: the student is taught that its own end is "
            "unlikely. Give both the same end (eos_token of tokenizer_config.json)",
            ours.eos_token,
            teacher,
            theirs.eos_token,
        )


def _tokenizer(folder: Path) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtraError("torch", "transformers") from error
    if not any(file for glob in _TOKENIZERS for file in folder.glob(glob)):
        raise ConfigError(
            f"{folder} has no tokenizer (tokenizer.json, or what its kind has in its place), and teacher and student are "
            "compared by it: copy the tokenizer's files there"
        )
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"the tokenizer in {folder} cannot be read ({error}): teacher and student are compared by it"
        ) from error


def _vocab_size(folder: Path) -> int:
    from transformers import AutoConfig

    try:
        return int(AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config().vocab_size)
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"the model's configuration in {folder} cannot be read: {error}") from error
