"""Committed steps taken again, each under the settings of its own config epoch: for a resume, a fork, a replay and a proof.

The invariant: a step is taken again on the batch that its record proves, by the algorithm and the optimizer that took it; where
that cannot be, an error says so before anything is changed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from lightning.algorithms.protocol import Algorithm, Batch, needs_critic
from lightning.config import Config, config_model
from lightning.engines.protocol import Engine
from lightning.errors import AuditError, ConfigError
from lightning.store.protocol import Store
from lightning.trainer.checkpoints import Checkpoints
from lightning.trainer.context import Numeric, base_digest, machine
from lightning.trainer.epochs import Epoch, epoch_at
from lightning.trainer.lr_schedule import optimizer_of, rate_of
from lightning.trainer.own_loop import OWN_LOOP
from lightning.trainer.run_stages import API, BringForward, RunStage, Start
from lightning.trainer.runs import describe_algorithm, differences, rebuild_algorithm
from lightning.trainer.teacher import TEACHER, Teacher, reference_of
from lightning.trainer.training_data import PolicyFault, is_batch_of, load_groups, recorded_values, rollouts_of
from lightning.types import Json, StepRecord
from pydantic import ValidationError

logger = logging.getLogger(__name__)

MACHINE_SETTINGS: Final = ("device", "threads", "tokens_per_microbatch", "gradient_checkpointing", "verl")
"""Settings of the section `engine` that belong to the machine: a step is taken again with those of this one."""


def algorithm_of(epoch: Epoch, given: Sequence[Algorithm]) -> Algorithm:
    """The algorithm of an epoch: one of those that were `given`, where it is described alike, or made again from its record.

    Raises `ConfigError` when only the user's own code could make it.
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
    """The batch of a committed step, made again from the store. Raises `AuditError` when it is not the one that was trained."""
    rollouts = await rollouts_of(store, record, epoch.max_staleness or 0)
    groups = await load_groups(store, rollouts, train_agents_of(epoch), policy_fault_of(epoch))
    if needs_critic(algorithm):
        groups = await recorded_values(store, record.run, record.step, groups)
    batch = algorithm.batch(groups)
    if not is_batch_of(record, batch):
        raise AuditError(
            f"step {record.step} of {record.run} cannot be replayed, since the same rollouts make another batch now "
            f"(another release, or a function that was edited?): run `lightning audit {record.run}`"
        )
    return batch


def train_agents_of(epoch: Epoch) -> tuple[str, ...]:
    """The globs of the agents that were trained."""
    agents = epoch.config.get("train_agents", [])
    return tuple(map(str, agents)) if isinstance(agents, (list, tuple)) else ()


def policy_fault_of(epoch: Epoch) -> PolicyFault:
    """What was made of rollouts that the policy failed."""
    found = epoch.setting("trainer", "policy_fault")
    if found == "mask":
        return "mask"
    return float(found) if isinstance(found, (int, float)) else "exclude"


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


@dataclass
class Rewinder:
    """A run's training state at a step: of its checkpoint, or made again from the newest before.

    `records`, `epochs` and `checkpoints` are the run's, `store` is where its rollouts are. Engines are made by `make_engine`
    with settings as they were, but for those that belong to the machine, which are `here`'s. `given` are algorithms at hand.
    `between` is where a state waits that one engine leaves to the next; none: it becomes a checkpoint of the run.
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
    """The one at hand."""
    machine_at: Callable[[int], Mapping[str, object]] | None = None
    """The settings of the section `engine` with which a step was computed, in place of those of `here`."""
    folder: Path | None = None
    """The run's, where that is not the one that the checkpoints are in."""

    async def bring_to(
        self, step: int, use: Callable[[Engine], object], watch: Callable[[Engine, StepRecord], object] | None = None
    ) -> None:
        """Call `use` (in a thread) with an engine that has the state after `step` steps; it is closed then. `watch` is called
        (in a thread) with the engine before each step that is taken again."""
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
        critic = self.epochs[0].config.get("critic")
        run = self.folder or self.checkpoints.folder.parent
        other = reference_of(engine, recorded and teacher_again(recorded, self.teacher, run))
        engine.open(self.model, optimizer_of(config), seed=config.trainer.seed, critic=bool(critic), **other)
        if state is not None:
            engine.load(state)

    async def bring_forward(self, engine: Engine, records: Sequence[StepRecord]) -> None:
        """See `BringForward`: the engine is opened as one is `here`."""
        for record in records:
            await self._take(engine, record, self.teacher)

    async def _take(self, engine: Engine, record: StepRecord, teacher: Teacher | None) -> None:
        rate = rate_of(self._config_at(record.step), self.epochs[0].config, record.step)
        await take_again(self.store, record, self.epochs, self.given, engine, rate, teacher)

    def needed(self, step: int) -> bool:
        """Whether some of the steps that lead from the newest checkpoint to `step` were taken by an engine that was opened
        otherwise than one is `here`."""
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
        """The settings that a step was taken with, on this machine. A dtype that was left to lightning is the one it chose."""
        epoch = epoch_at(self.epochs, step)
        try:
            config = config_model().model_validate(epoch.config.get("config"))
        except ValidationError as error:
            raise ConfigError(
                f"the settings of config epoch {epoch.number} are not this release's, so that its steps cannot be taken again: "
                f"resume with the release that took them, or begin at a checkpoint ({error.errors()[0]['loc']})"
            ) from error
        if self.machine_at is None:
            update = {name: getattr(self.here.engine, name) for name in MACHINE_SETTINGS}
        else:
            update = dict(self.machine_at(step))
        if config.engine.dtype == "auto":
            chosen = self.records[step - 1].context.get("dtype") if step <= len(self.records) else None
            update["dtype"] = chosen or self.here.engine.dtype
        engine = config.engine.model_copy(update=update)
        return config.model_copy(update={"engine": engine})


def _opened_with(config: Config, teacher: Teacher | None) -> object:
    """What an engine is opened with; the number of steps only where the learning rate falls until the last of them."""
    falls = config.engine.lr_schedule != "constant"
    digest = None if teacher is None else teacher.digest
    return config.engine, config.trainer.seed, config.trainer.steps if falls else None, digest


async def take_again(
    store: Store,
    record: StepRecord,
    epochs: Sequence[Epoch],
    given: Sequence[Algorithm],
    engine: Engine,
    rate: float,
    teacher: Teacher | None = None,
) -> None:
    """Take a committed step again on the engine, which has the state before it and this teacher, at this rate. Raises
    `AuditError` where the step was taken by a loop of its own, or with another teacher."""
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
    """Takes the steps of a run that goes on again, so that it may have fewer checkpoints than steps."""

    api = API

    async def bring_forward(
        self, start: Start, records: Sequence[StepRecord], epochs: Sequence[Epoch], teacher: Teacher | None
    ) -> BringForward:
        """See `RunStage.bring_forward`."""
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
