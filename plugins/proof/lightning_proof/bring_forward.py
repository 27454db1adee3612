"""Take committed steps again, each with the settings of its config epoch: for a resume, a fork, or `lightning replay --train`.

The invariant: a step is taken again on exactly the batch in its record, by the algorithm and the optimizer that took it. If
that is impossible, an error is raised before anything changes.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, cast

from lightning.algorithms.protocol import Algorithm, Batch, head_of
from lightning.config import Config, recorded_config
from lightning.engines.protocol import Engine
from lightning.errors import AuditError, ConfigError
from lightning.plugins import plugins
from lightning.store.protocol import Store
from lightning.trainer.checkpoints import Checkpoints
from lightning.trainer.context import (
    TEACHER,
    Epoch,
    Numeric,
    Teacher,
    base_digest,
    epoch_at,
    machine,
    reference_of,
)
from lightning.trainer.model import made_head, optimizer_of, rate_of
from lightning.trainer.run_stages import API, BringForward, RunStage, Start
from lightning.trainer.runs import describe_algorithm, differences, rebuild_algorithm
from lightning.trainer.training_data import agents_of_step, load_groups
from lightning.types import Json, StepRecord

from lightning_proof.recorded_step import OWN_LOOP, is_batch_of, recorded_values, rollouts_of

logger = logging.getLogger(__name__)

MACHINE_SETTINGS: Final = ("device", "threads", "tokens_per_microbatch", "gradient_checkpointing", "verl")
"""Settings of the section `engine` that belong to the machine. A step is taken again with this machine's values."""


def algorithm_of(epoch: Epoch, given: Sequence[Algorithm]) -> Algorithm:
    """Return the algorithm of an epoch: one of `given` if it has the same description, else one that is made from the record.

    Raises `ConfigError` if only the user's own code can make it.
    """
    recorded: Mapping[str, Json] = {"algorithm": epoch.config.get("algorithm")}
    for algorithm in given:
        if not differences(recorded, {"algorithm": describe_algorithm(algorithm)}):
            return algorithm
    if made := rebuild_algorithm(epoch.config):
        return made
    raise ConfigError(
        f"steps from {epoch.first} on were taken by an algorithm that only its own code can make again, and have to be taken "
        "again: resume with that algorithm, or begin a new run at a checkpoint (--from RUN@STEP)"
    )


async def batch_of(store: Store, record: StepRecord, epoch: Epoch, algorithm: Algorithm) -> Batch:
    """Make the batch of a committed step again from the store. Raises `AuditError` if it is not the batch that was trained."""
    rollouts = await rollouts_of(store, record, epoch.max_staleness or 0)
    groups = await load_groups(store, rollouts, agents_of_step(epoch, record), epoch.policy_fault)
    if head_of(algorithm):
        groups = await recorded_values(store, record.run, record.step, groups)
    batch = algorithm.batch(groups)
    if not is_batch_of(record, batch):
        raise AuditError(
            f"step {record.step} of {record.run} cannot be replayed, since the same rollouts make another batch now "
            f"(another release, or a function that was edited?): run `lightning audit {record.run}`"
        )
    return batch


def recorded_teacher(record: StepRecord) -> Teacher | None:
    """Return the teacher with which a step was taken; None if it had none."""
    found = record.context.get(TEACHER)
    if not isinstance(found, Mapping):
        return None
    return Teacher(str(found.get("name")), Path(str(found.get("model"))), str(found.get("sha256")))


def teacher_again(recorded: Teacher, here: Teacher | None, run: Path | None = None) -> Teacher:
    """Return the teacher for a step that is to be taken again: `here`, if it has the recorded digest, else the model in the
    recorded folder, or in the folder of the `run` if that has moved. Raises `ConfigError` if its files are gone or changed."""
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


@dataclass
class Rewinder:
    """Brings an engine to a run's training state after a step, from the newest checkpoint before it.

    `records`, `epochs` and `checkpoints` are the run's, and `store` has its rollouts. `make_engine` makes an engine from the
    recorded settings, with those of the machine from `here`. `given` are algorithms that need not be made from a record.
    `between` is the folder for a state that one engine passes on to the next; None: it becomes a checkpoint of the run.
    """

    store: Store
    records: Sequence[StepRecord]
    epochs: Sequence[Epoch]
    checkpoints: Checkpoints
    make_engine: Callable[[Config], Engine]
    model: Path
    here: Config
    given: Sequence[Algorithm] = ()
    between: Path | None = None
    teacher: Teacher | None = None
    """The teacher of the present settings; None for none."""
    machine_at: Callable[[int], Mapping[str, object]] | None = None
    """Returns, for a step, the machine's settings of the section `engine` to use instead of those of `here`; None: use
    `here`."""
    folder: Path | None = None
    """The run's folder; None if it is the parent of the checkpoints' folder."""

    async def bring_to(
        self, step: int, use: Callable[[Engine], object], watch: Callable[[Engine, StepRecord], object] | None = None
    ) -> None:
        """Call `use` (in a thread) with an engine that has the state after `step` steps, and close the engine afterwards.
        `watch` is called (in a thread) with the engine before each step that is taken again."""
        begun = self.checkpoints.newest(step)
        state = None if begun is None else self.checkpoints.path(begun)
        left = self.records[begun or 0 : step]
        alike = [list(part) for _, part in itertools.groupby(left, key=lambda record: self._training(record.step))]
        for part in alike or [[]]:
            last = part[-1].step if part else max(1, step)
            config = self._config_at(last)
            engine = self.make_engine(config)
            try:
                await asyncio.to_thread(self._open, engine, config, state, self._teacher_at(last) if part else None)
                for record in part:
                    if watch is not None:
                        await asyncio.to_thread(watch, engine, record)
                    await self._take(engine, record, self._teacher_at(last))
                if part is (alike or [part])[-1]:
                    await asyncio.to_thread(use, engine)
                else:
                    state = self.between or self.checkpoints.path(last)
                    await asyncio.to_thread(engine.save, state)
            finally:
                await asyncio.to_thread(engine.close)

    def _open(self, engine: Engine, config: Config, state: Path | None, recorded: Teacher | None) -> None:
        head = made_head(config, self.epochs[0].config.get("head"))
        run = self.folder or self.checkpoints.folder.parent
        other = reference_of(engine, recorded and teacher_again(recorded, self.teacher, run))
        engine.open(self.model, optimizer_of(config), seed=config.trainer.seed, head=head, **other)
        if state is not None:
            engine.load(state)

    async def bring_forward(self, engine: Engine, records: Sequence[StepRecord]) -> None:
        """Take the steps `records` again on an engine that was opened with the settings of `here` and has the state before
        them."""
        for record in records:
            await self._take(engine, record, self.teacher)

    async def _take(self, engine: Engine, record: StepRecord, teacher: Teacher | None) -> None:
        rate = rate_of(self._config_at(record.step), self.epochs[0].config, record.step)
        await take_again(self.store, record, self.epochs, self.given, engine, rate, teacher)

    def needed(self, step: int) -> bool:
        """Whether a step between the newest checkpoint and `step` was taken by an engine that was opened with other settings
        than those of `here`."""
        present = _opened_with(self.here, self.teacher)
        return any(
            self._training(taken) != present for taken in range((self.checkpoints.newest(step) or 0) + 1, step + 1)
        )

    def _training(self, step: int) -> object:
        """What an engine is opened with for a step."""
        return _opened_with(self._config_at(step), self._teacher_at(step))

    def _teacher_at(self, step: int) -> Teacher | None:
        return recorded_teacher(self.records[step - 1]) if step <= len(self.records) else None

    def _config_at(self, step: int) -> Config:
        """Return the settings with which a step was taken, with those of this machine. If the dtype was "auto", it is the one
        that was chosen then. Raises `ConfigError` for settings of another release."""
        epoch = epoch_at(self.epochs, step)
        try:
            config, unknown = recorded_config(cast("Mapping[str, object]", epoch.config.get("config")))
            # Engines and heads of absent plugins are refused by their names; no other setting of an engine may be missing.
            if gone := [key for key in unknown if key.startswith("engine.") and not plugins().brought("settings", key)]:
                raise ConfigError(f"unknown: {', '.join(gone)}")
        except ConfigError as error:
            raise ConfigError(
                f"the settings of config epoch {epoch.number} are not this release's, so that its steps cannot be taken again: "
                f"resume with the release that took them, or begin at a checkpoint ({error})"
            ) from error
        if self.machine_at is None:
            update = {name: getattr(self.here.engine, name, None) for name in MACHINE_SETTINGS}
        else:
            update = dict(self.machine_at(step))
        if config.engine.dtype == "auto":
            chosen = self.records[step - 1].context.get("dtype") if step <= len(self.records) else None
            update["dtype"] = chosen or self.here.engine.dtype
        here = {name: value for name, value in update.items() if name in type(config.engine).model_fields}
        engine = config.engine.model_copy(update=here)
        return config.model_copy(update={"engine": engine})


def _opened_with(config: Config, teacher: Teacher | None) -> object:
    """Return the values that determine how an engine is opened, to compare. The number of steps is one of them only if the
    learning rate depends on it. Policies have rates of their own."""
    falls = config.engine.lr_schedule != "constant"
    digest = None if teacher is None else teacher.digest
    policies = getattr(config, "policies", None)  # absent without the plugin
    return config.engine, policies, config.trainer.seed, config.trainer.steps if falls else None, digest


async def take_again(
    store: Store,
    record: StepRecord,
    epochs: Sequence[Epoch],
    given: Sequence[Algorithm],
    engine: Engine,
    rate: float,
    teacher: Teacher | None = None,
) -> None:
    """Take a committed step again, with the learning rate `rate`, on an engine that has the state before the step and this
    teacher. Raises `AuditError` if a loop of the user's own (`Trainer.session`) took the step, or if it had another teacher."""
    if record.context.get(OWN_LOOP):
        raise AuditError(
            f"step {record.step} of {record.run} was taken by a loop of its own (Trainer.session), and only that can take it "
            "again: begin at its checkpoint (--from RUN@STEP)"
        )
    then = recorded_teacher(record)
    if (then and then.digest) != (teacher and teacher.digest):
        named = [f"the teacher {one.name} ({one.digest[:12]}...)" if one else "no teacher" for one in (then, teacher)]
        raise AuditError(
            f"step {record.step} of {record.run} was taken with {named[0]} and cannot be taken again with {named[1]}: give the "
            "one that it had"
        )
    epoch = epoch_at(epochs, record.step)
    algorithm = algorithm_of(epoch, given)
    batch = await batch_of(store, record, epoch, algorithm)
    await asyncio.to_thread(engine.step, batch.samples, batch.loss_for(algorithm), rate)
    now = (engine.numerics() if isinstance(engine, Numeric) else {}) | machine()
    if other := [key for key in now if record.context.get(key, now[key]) != now[key]]:
        logger.warning(
            "step %d is taken again with other %s (%s): it is the same but for rounding",
            record.step,
            ", ".join(other),
            ", ".join(f"{record.context[key]} → {now[key]}" for key in other),
        )


class Resumes(RunStage):
    """The run stage that takes a resumed run's steps since its newest checkpoint again, so that a run needs no checkpoint for
    each step."""

    api = API

    async def bring_forward(
        self, start: Start, records: Sequence[StepRecord], epochs: Sequence[Epoch], teacher: Teacher | None
    ) -> BringForward:
        """Prepare to bring the engine to the last committed step, and return the function that does so. Steps that were taken
        under other settings are taken again at once, and their state becomes a checkpoint."""
        again = Rewinder(
            start.store,
            records,
            epochs,
            Checkpoints(start.folder / "checkpoints", start.config.trainer.keep_checkpoints),
            start.make_engine,
            start.model,
            start.config,
            [algorithm for _, algorithm in start.phases],
            teacher=teacher,
        )
        if again.needed(len(records)):
            start.reporter.phase("taking steps again under the settings that they were taken with")
            await again.bring_to(len(records), lambda engine: engine.save(again.checkpoints.path(len(records))))
        return again.bring_forward
