"""What a run begins with, or goes on with: its config epochs, and the training state that its engine loads.

The invariant: the state on disk is the one that the run's committed steps lead to, each under its own settings; nothing is
changed for a run that cannot begin. The version 0 of a run that was forked (`--from RUN@STEP`) is bit for bit what the other
run had after that many steps. Its optimizer goes on where the new settings have room for the other's training state; where they
do not, the weights alone are taken, and that is said.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from lightning.algorithms.protocol import SearchAlgorithm
from lightning.config import Config
from lightning.engines.protocol import Engine
from lightning.errors import AuditError, ConfigError, EngineError, StoreError
from lightning.plugins import plugins
from lightning.store.places import run_id_of, split_reference, store_in
from lightning.store.protocol import Store
from lightning.store.url import redacted
from lightning.trainer.algorithm import AlgorithmSchedule
from lightning.trainer.checkpoints import Checkpoints
from lightning.trainer.context import base_digest, weight_files
from lightning.trainer.epochs import Epoch, epoch_at, read_epochs
from lightning.trainer.lr_schedule import EARLIER_STEPS, earlier_steps
from lightning.trainer.model import resolve_model
from lightning.trainer.plan import task_ids
from lightning.trainer.replay import FORKED, MODEL, Rewinder
from lightning.trainer.runs import changes_of, describe_algorithm, not_loadable, plan_epochs
from lightning.trainer.summary import Reporter
from lightning.trainer.teacher import (
    TEACHER,
    Teacher,
    check_same_tokens,
    check_unchanged,
    recorded_teacher,
    teacher_named,
)
from lightning.types import Json, Run, StepRecord

logger = logging.getLogger(__name__)


BETWEEN = "between"
"""That of the training state at the end of a config epoch of the other run, while its steps are taken again."""


async def fork(parent: str, into: Path, described: Mapping[str, Json], config: Config, store: str) -> dict[str, Json]:
    """Put what the run `parent` (`RUN@STEP`, `RUN` for its last step) had into the folder of a new run: its training state as
    the checkpoint of step 0, or, where that does not fit the settings, its model. Returns the keys of
    the new run's configuration that say so.

    RUN is a folder, or the name of one beside the new run's. `store` is the URL of its store where its folder has none.
    Raises `ConfigError`, naming what there is, for a run or a step that is not there or cannot be made again.
    """
    async with _opened(parent, into, store) as theirs:
        return await _fork(theirs, into, described, config)


async def export_step(parent: str, into: Path, target: Path, config: Config, store: str) -> None:
    """Write the model that the run `parent` (as of `fork`) had at its step to the folder `target`; `into` is the folder of the
    run that asks. Raises what `fork` does."""
    async with _opened(parent, into, store) as theirs:
        between = into / BETWEEN
        try:
            await theirs.rewinder(theirs.base, config, between).bring_to(
                theirs.step, lambda brought: brought.export(target)
            )
        except (AuditError, StoreError, ConfigError, EngineError, OSError) as error:
            raise theirs.lost(error) from error
        finally:
            shutil.rmtree(between, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class _RunAt:
    """A run that somebody begins with, at a step, with its opened store."""

    store: Store
    run: Run
    step: int
    folder: Path
    records: Sequence[StepRecord]
    epochs: Sequence[Epoch]

    @property
    def checkpoints(self) -> Checkpoints:
        """Its training states."""
        return Checkpoints(self.folder / "checkpoints", keep=1)

    @property
    def base(self) -> Path:
        """The folder of the model that it began with."""
        return self.folder / MODEL if (self.folder / MODEL).is_dir() else Path(str(self.run.config["model"]))

    def rewinder(self, model: Path, config: Config, between: Path) -> Rewinder:
        """What brings an engine to its step."""
        make_engine = plugins().engine(str(self.run.config.get("engine", "torch")))
        return Rewinder(
            self.store, self.records, self.epochs, self.checkpoints, make_engine, model, config, between=between
        )

    def lost(self, error: Exception) -> ConfigError:
        """What to raise where that cannot be done."""
        there = ", ".join(f"{self.run.id}@{saved}" for saved in self.checkpoints.steps()) or "none"
        return ConfigError(f"{self.run.id}@{self.step} cannot be made again ({error}). Checkpoints: {there}")


@asynccontextmanager
async def _opened(parent: str, into: Path, store: str) -> AsyncIterator[_RunAt]:
    name, at, text = split_reference(parent, "@", into.parent)
    if at and not text.isdecimal():
        raise ConfigError(
            f"{parent!r} names no step of a run: write RUN@STEP, as runs/first@20, or RUN for its last step"
        )
    folder = _folder(name, into)
    url = store_in(folder) if (folder / "lightning.db").is_file() else store or store_in(folder)
    async with plugins().opened_store(url) as opened:
        run = await opened.get_run(run_id_of(folder))
        if run is None:
            raise ConfigError(f"the store of {folder} does not know its run: give the --store that it was trained with")
        records, epochs = await opened.steps(run.id), await read_epochs(opened, run)
        step = int(text) if text else len(records)
        if step > len(records):
            raise ConfigError(f"run {run.id} has {len(records)} committed steps: there is no {run.id}@{step}")
        yield _RunAt(opened, run, step, folder, records, epochs)


async def _fork(parent: _RunAt, into: Path, described: Mapping[str, Json], config: Config) -> dict[str, Json]:
    run, step, folder, records, epochs = parent.run, parent.step, parent.folder, parent.records, parent.epochs
    theirs = parent.checkpoints
    target = Checkpoints(into / "checkpoints", keep=1).path(0)
    theirs_then = epoch_at(epochs, max(0, step - 1)).config
    lost = await not_loadable(theirs_then, described, records[:step])
    if theirs_then.get("critic") and not described["critic"]:  # a resume keeps it; a fork begins without
        lost.append("critic")
    model = Path(str(run.config["model"] if "model" in lost else described["model"]))
    if (folder / MODEL).is_dir():  # a fork itself, of a model that is in no other folder
        model, lost = folder / MODEL, [*lost, "model"]
    between = into / BETWEEN
    rewinder = parent.rewinder(model, config, between)
    for old in (target, into / MODEL):  # of a start that broke off
        shutil.rmtree(old, ignore_errors=True)
    try:
        if lost:
            logger.warning(
                "the training state of %s@%d does not fit other settings of %s: the run begins with its weights, and with a "
                "fresh optimizer",
                run.id,
                step,
                ", ".join(lost),
            )
            await rewinder.bring_to(step, lambda brought: brought.export(into / MODEL))
        elif theirs.newest(step) == step:
            await asyncio.to_thread(shutil.copytree, theirs.path(step), target)
        else:
            await rewinder.bring_to(step, lambda brought: brought.save(target))
    except (AuditError, StoreError, ConfigError, EngineError, OSError) as error:
        raise parent.lost(error) from error
    finally:
        shutil.rmtree(between, ignore_errors=True)
    earlier = {} if lost else {EARLIER_STEPS: earlier_steps(run.config) + step}
    return {FORKED: f"{run.id}@{step}", **earlier}


def _folder(name: str, into: Path) -> Path:
    tried = [Path(name), into.parent / name]
    for folder in tried:
        if store_in(folder):
            return folder
    there = sorted(run.parent.name for run in into.parent.glob("*/run.json"))
    raise ConfigError(
        f"no run {redacted(name)!r}: neither {tried[0]} nor {tried[1]} is a run's folder; {into.parent} has "
        f"{', '.join(there) or 'none'}"
    )


async def find_teacher(
    schedule: AlgorithmSchedule, student: Path, into: Path, config: Config, url: str, store: Store
) -> Teacher | None:
    """The teacher of a run in the folder `into`, found and compared with its student; None for a run without.

    A run's step is written below `into`, and kept from the first step on that it taught; before, the run that it is of may have
    been trained anew. `url` is that of a store where the teacher's run has none in its folder; `store` has the student's.
    Raises `ConfigError` for a teacher that is not there or has no weights, and for one of other tokens.
    """
    name = await asyncio.to_thread(teacher_named, schedule)
    if not name:
        return None
    taught = [found for record in await store.steps(run_id_of(into)) if (found := recorded_teacher(record)) is not None]
    kept = any(teacher.name == name for teacher in taught)
    folder = await _teacher_folder(name, into, config, url, kept=kept)
    if not await asyncio.to_thread(weight_files, folder):
        raise ConfigError(
            f"the teacher {name} has no weights: {folder} has none of a model's weight files. Copy them there"
        )
    await asyncio.to_thread(check_same_tokens, student, folder)
    return Teacher(name, folder, await asyncio.to_thread(base_digest, folder, into / f"{TEACHER}.json"))


async def _teacher_folder(name: str, into: Path, config: Config, url: str, *, kept: bool) -> Path:
    run, at, step = split_reference(name, "@", into.parent)
    if at and step.isdecimal():
        known = hashlib.sha256(name.encode()).hexdigest()[:8]
        made = into / TEACHER / f"{Path(run).name}@{step}-{known}"
        if not (kept and (made / "config.json").is_file()):  # it is written whole or not at all
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


def warn_of_tasks(before: Epoch, after: Epoch) -> None:
    """Say that a run goes on with other training tasks."""
    old, new = task_ids(before), task_ids(after)
    given = after.setting("trainer", "order") == "given"
    if not old or old == new or (not given and set(old) == set(new)):
        return
    moved = "" if set(old) != set(new) else ", and they stand in another order"
    rule = (
        "trainer.order = given goes on at its place in the list, so tasks that moved may come twice in a pass or not at all"
        if given
        else "what a pass has taken comes no second time in it, and new ones join it where their turn is still to come"
    )
    logger.warning(
        "the training tasks changed: %d added, %d removed%s; %s",
        len(set(new) - set(old)),
        len(set(old) - set(new)),
        moved,
        rule,
    )


@dataclass(frozen=True, slots=True)
class Beginning:
    """What is known of a run before anything of it is started. `url` is that of its store where it is not in the folder."""

    store: Store
    folder: Path
    model: Path
    schedule: AlgorithmSchedule | SearchAlgorithm
    config: Config
    make_engine: Callable[[Config], Engine]
    url: str
    reporter: Reporter
    teacher: Teacher | None = None

    async def prepare(self, run: Run, described: dict[str, Json], parent: str | None) -> tuple[Run, list[Epoch], Path]:
        """The run, its epochs, and the folder of the model that it begins with. `parent` is the run to fork, if any.

        Raises `ConfigError` for a parent that a run cannot have and for a teacher whose weights are others than in the steps
        that were taken, and what `fork` and `Rewinder` do.
        """
        model, records = self.model, await self.store.steps(run.id)
        if self.teacher is not None:
            check_unchanged(self.teacher, records)
        if parent is not None:
            run = await self._forked(run, described, parent)
        if FORKED in run.config:
            described |= {key: run.config[key] for key in (FORKED, EARLIER_STEPS) if key in run.config}
            model = self.folder / MODEL if (self.folder / MODEL).is_dir() else model
        else:
            self._checkpoints.discard(0)  # of a fork that did not begin
        described["critic"] = described["critic"] or run.config.get("critic", "")
        phases = self.schedule.phases if isinstance(self.schedule, AlgorithmSchedule) else ()
        algorithms = [(first, describe_algorithm(algorithm)) for first, algorithm in phases]
        epochs = await plan_epochs(self.store, run, described, algorithms)
        committed = len(records)
        for epoch in epochs[1:]:
            if committed and epoch.first == committed:
                changed = "\n  ".join(changes_of(epochs, epoch.number))
                self.reporter.say(f"config epoch {epoch.number} begins with step {committed}:\n  {changed}")
                warn_of_tasks(epochs[epoch.number - 1], epoch)
        given = [algorithm for _, algorithm in phases]
        again = Rewinder(
            self.store,
            records,
            epochs,
            self._checkpoints,
            self.make_engine,
            model,
            self.config,
            given,
            teacher=self.teacher,
        )
        if again.needed(committed):
            self.reporter.phase("taking steps again under the settings that they were taken with")
            await again.bring_to(committed, lambda engine: engine.save(self._checkpoints.path(committed)))
        return run, epochs, model

    async def _forked(self, run: Run, described: dict[str, Json], parent: str) -> Run:
        if not isinstance(self.schedule, AlgorithmSchedule):
            raise ConfigError("a search for prompts trains no weights, so that it cannot begin with those of a run")
        if await self.store.get_run(run.id) is not None:
            if FORKED not in run.config:
                raise ConfigError(
                    f"run {run.id!r} began with the model's own weights: give another `out` to fork a run"
                )
            theirs, step = str(run.config[FORKED]).rsplit("@", 1)
            name, _, asked = split_reference(parent, "@", self.folder.parent)
            if theirs not in {run_id_of(Path(name)), run_id_of(self.folder.parent / name)} or asked not in ("", step):
                raise ConfigError(
                    f"run {run.id!r} began with the weights of {theirs}@{step}, not of {parent}: leave --from out to go on "
                    "with it, or give another `out`"
                )
            return run
        self.reporter.phase(f"taking the weights of {parent}")
        forked = await fork(parent, self.folder, described, self.config, self.url)
        return replace(run, config={**run.config, **forked})

    @property
    def _checkpoints(self) -> Checkpoints:
        return Checkpoints(self.folder / "checkpoints", self.config.trainer.keep_checkpoints)
