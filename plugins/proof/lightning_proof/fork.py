"""Forks: a run begins with what another run had after a step (`--from RUN@STEP`).

The invariant: the version 0 of the run is bit for bit what the other run had after that many steps. Its optimizer goes on where
the new settings have room for the other's training state; where they do not, the weights alone are taken, and that is said.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from lightning.config import Config
from lightning.engines.protocol import Engine
from lightning.errors import AuditError, ConfigError, EngineError, StoreError
from lightning.plugins import plugins
from lightning.store.places import run_id_of, split_reference, store_in
from lightning.store.protocol import Store
from lightning.store.url import redacted
from lightning.trainer.checkpoints import Checkpoints
from lightning.trainer.context import Epoch, epoch_at, read_epochs
from lightning.trainer.model import EARLIER_STEPS, earlier_steps
from lightning.trainer.run_stages import API, FORKED, MODEL, Begun, RunStage, Start
from lightning.trainer.runs import not_loadable
from lightning.types import Json, Run, StepRecord

from lightning_proof.bring_forward import Rewinder

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
        run, step, folder, records, epochs = theirs.run, theirs.step, theirs.folder, theirs.records, theirs.epochs
        target = Checkpoints(into / "checkpoints", keep=1).path(0)
        theirs_then = epoch_at(epochs, max(1, step)).config
        lost = await not_loadable(theirs_then, described, records[:step])
        if theirs_then.get("head") and not described["head"]:  # a resume keeps it; a fork begins without
            lost.append("head")
        model = Path(str(run.config["model"] if "model" in lost else described["model"]))
        if (folder / MODEL).is_dir():  # a fork itself, of a model that is in no other folder
            model, lost = folder / MODEL, [*lost, "model"]
        for old in (target, into / MODEL):  # of a start that broke off
            shutil.rmtree(old, ignore_errors=True)
        if lost:
            logger.warning(
                "the training state of %s@%d does not fit other settings of %s: the run begins with its weights, and with a "
                "fresh optimizer",
                run.id,
                step,
                ", ".join(lost),
            )
            await theirs.make(lambda brought: brought.export(into / MODEL), model, config, into / BETWEEN)
        elif theirs.checkpoints.newest(step) == step:
            try:
                await asyncio.to_thread(shutil.copytree, theirs.checkpoints.path(step), target)
            except OSError as error:
                raise theirs.lost(error) from error
        else:
            await theirs.make(lambda brought: brought.save(target), model, config, into / BETWEEN)
        earlier = {} if lost else {EARLIER_STEPS: earlier_steps(run.config) + step}
        return {FORKED: f"{run.id}@{step}", **earlier}


async def export_step(parent: str, into: Path, target: Path, config: Config, store: str) -> None:
    """Write the model that the run `parent` (as of `fork`) had at its step to the folder `target`; `into` is the folder of the
    run that asks. Raises what `fork` does."""
    async with _opened(parent, into, store) as theirs:
        await theirs.make(
            lambda brought: brought.export(target), model_of(theirs.run, theirs.folder), config, into / BETWEEN
        )


@dataclass(frozen=True, slots=True)
class RunAt:
    """A run at a step, with its opened store: what somebody begins with, or asks."""

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
    def there(self) -> str:
        """Its steps that have a training state, for people."""
        return ", ".join(f"{self.run.id}@{saved}" for saved in self.checkpoints.steps()) or "none"

    async def make(self, use: Callable[[Engine], object], model: Path, config: Config, between: Path) -> None:
        """Call `use` (in a thread) with an engine that was brought to its step from this model, with these settings of the
        machine; `between` is a folder for the time of it. Raises `ConfigError`, naming the checkpoints, where that cannot be.
        """
        make_engine = plugins().engine(str(self.run.config.get("engine", "torch")))
        again = Rewinder(
            self.store, self.records, self.epochs, self.checkpoints, make_engine, model, config, between=between
        )
        try:
            await again.bring_to(self.step, use)
        except (AuditError, StoreError, ConfigError, EngineError, OSError) as error:
            raise self.lost(error) from error
        finally:
            shutil.rmtree(between, ignore_errors=True)

    def lost(self, error: Exception) -> ConfigError:
        """What to raise where it cannot be made again."""
        return ConfigError(f"{self.run.id}@{self.step} cannot be made again ({error}). Checkpoints: {self.there}")


def model_of(run: Run, folder: Path) -> Path:
    """The folder of the model that a run began with, which may not be there any more; `folder` is the run's."""
    return folder / MODEL if (folder / MODEL).is_dir() else Path(str(run.config.get("model", "nowhere")))


@asynccontextmanager
async def _opened(parent: str, into: Path, store: str) -> AsyncIterator[RunAt]:
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
        yield RunAt(opened, run, step, folder, records, epochs)


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


class Forks(RunStage):
    """Brings a run what another run had after a step."""

    api = API

    async def begun(self, start: Start, parent: str) -> Begun:
        """See `RunStage.begun`."""
        run = start.run
        if not start.phases:
            raise ConfigError("a search for prompts trains no weights, so that it cannot begin with those of a run")
        if await start.store.get_run(run.id) is None:
            start.reporter.phase(f"taking the weights of {parent}")
            described = await fork(parent, start.folder, start.described, start.config, start.url)
        elif FORKED not in run.config:
            raise ConfigError(f"run {run.id!r} began with the model's own weights: give another `out` to fork a run")
        else:
            _check_same(run, parent, start.folder)
            described = {key: run.config[key] for key in (FORKED, EARLIER_STEPS) if key in run.config}
        own = start.folder / MODEL
        return Begun(described, own if own.is_dir() else start.model)


def _check_same(run: Run, parent: str, folder: Path) -> None:
    """Raise `ConfigError` where a run that goes on began with other weights than those of `parent`, if that is given."""
    theirs, step = str(run.config[FORKED]).rsplit("@", 1)
    name, _, asked = split_reference(parent, "@", folder.parent)
    if parent and (theirs not in {run_id_of(Path(name)), run_id_of(folder.parent / name)} or asked not in ("", step)):
        raise ConfigError(
            f"run {run.id!r} began with the weights of {theirs}@{step}, not of {parent}: leave --from out to go on "
            "with it, or give another `out`"
        )
