"""Find the teacher of a distillation run by its name, and check it against the student and the run's earlier steps.

The invariant: a teacher is identified by the digest of its weights, and no step is taken with other weights under the same
name. A model whose tokens differ from the student's is refused before anything is started.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from lightning.algorithms.protocol import Algorithm, teacher_of
from lightning.config import Config
from lightning.engines.protocol import ChecksTeacher, Engine
from lightning.errors import ConfigError, EngineError, MissingExtraError
from lightning.losses.protocol import needs_reference
from lightning.store.places import split_reference, store_in
from lightning.trainer.context import TEACHER, Teacher, base_digest, reference_of, weight_files
from lightning.trainer.model import resolve_model
from lightning.trainer.run_stages import API, RunStage, Start
from lightning_proof.bring_forward import recorded_teacher
from lightning_proof.fork import export_step

logger = logging.getLogger(__name__)

SHOWN: Final = 3
"""Most tokens that an error names."""
_TOKENIZERS = ("*token*", "vocab*", "*.model", "merges.txt", "tekken.json")
"""Patterns of files, one of which every tokenizer has. Without any, `transformers` would make an empty tokenizer."""


class Teachers(RunStage):
    """The run stage `teachers`, which finds and checks the teacher of a run."""

    api = API

    async def teacher(self, start: Start) -> Teacher:
        """See `RunStage.teacher`.

        A teacher `RUN@STEP` is exported below this run's folder. The export is used again only after the teacher has taught a
        step; before that it is written anew, because the teacher's run may have been trained again. Raises `ConfigError` for a
        teacher that does not exist, has no weights, has other tokens than the student, or has changed.
        """
        name, into = await asyncio.to_thread(teacher_named, start.phases), start.folder
        records = await start.store.steps(start.run.id)
        taught = [found for record in records if (found := recorded_teacher(record)) is not None]
        kept = any(teacher.name == name for teacher in taught)
        folder = await _teacher_folder(name, into, start.config, start.url, kept=kept)
        if not await asyncio.to_thread(weight_files, folder):
            raise ConfigError(
                f"the teacher {name} has no weights: {folder} has none of a model's weight files. Copy them there"
            )
        await asyncio.to_thread(check_same_tokens, start.model, folder)
        found = Teacher(name, folder, await asyncio.to_thread(base_digest, folder, into / f"{TEACHER}.json"))
        await asyncio.to_thread(check_teacher, start.make_engine(start.config), found)
        check_unchanged(found, taught)
        return found


async def _teacher_folder(name: str, into: Path, config: Config, url: str, *, kept: bool) -> Path:
    run, at, step = split_reference(name, "@", into.parent)
    if at and step.isdecimal():
        known = hashlib.sha256(name.encode()).hexdigest()[:8]
        made = into / TEACHER / f"{Path(run).name}@{step}-{known}"
        if not (kept and (made / "config.json").is_file()):  # an export is whole if it has this file
            try:
                await export_step(name, into, made, config, url)
            except ConfigError as error:
                raise ConfigError(f"the teacher {name} is not there: {error}") from error
        return made.resolve()
    if any(store_in(folder) for folder in (Path(name), into.parent / name)):
        raise ConfigError(f"the teacher {name} is a run: say which step of it, as {name}@20")
    try:
        return await asyncio.to_thread(resolve_model, name)
    except ConfigError as error:
        raise ConfigError(f"the teacher {name} is not there: {error}; a run's step is written RUN@STEP") from error


def teacher_named(phases: Sequence[tuple[int, Algorithm]]) -> str:
    """Return the name of the teacher that a run's algorithms ask for; empty for none. Raises `ConfigError` if they need more
    than one reference model, because an engine has only one."""
    algorithms = [algorithm for _, algorithm in phases]
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


def check_unchanged(teacher: Teacher, taught: Sequence[Teacher]) -> None:
    """Raise `ConfigError` if the last step with a teacher of this name was taken with other weights. `taught` are the teachers
    of earlier steps, in order."""
    before = next((found for found in reversed(taught) if found.name == teacher.name), None)
    if before is not None and before.digest != teacher.digest:
        raise ConfigError(
            f"the teacher {teacher.name} in {teacher.folder} has changed: the SHA-256 of its weights is "
            f"{teacher.digest[:12]}... now, and was {before.digest[:12]}... when this run's last step with it "
            "was taken. Put the old files back; or put the new model into another folder, which begins a new config epoch"
        )


def check_teacher(engine: Engine, teacher: Teacher) -> None:
    """Raise `ConfigError` for a teacher that the engine cannot load beside the trained model, before anything is started."""
    reference_of(engine, teacher)
    if isinstance(engine, ChecksTeacher):
        try:
            engine.check_teacher(teacher.folder)
        except EngineError as error:
            raise ConfigError(f"the teacher {teacher.name} cannot be loaded: {error}") from error


def check_same_tokens(student: Path, teacher: Path) -> None:
    """Raise `ConfigError` if a teacher's tokens differ from the student's, naming the first differences, or if it has logits
    for fewer ids. Log a warning if their end-of-sequence tokens differ."""
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
