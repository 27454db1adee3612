"""Forks: start a run from the state that another run had after a step (`--from RUN@STEP`).

The invariant: version 0 of the run has bit for bit the weights of the other run after that step. The optimizer continues from
the other run's state if the new settings fit it; otherwise only the weights are taken, and a warning says so.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from lightning.config import Config
from lightning.engines.protocol import Engine
from lightning.errors import AuditError, ConfigError, EngineError, StoreError
from lightning.plugins import plugins
from lightning.store.places import policy_in, run_id_of, split_reference, store_in
from lightning.store.protocol import Store
from lightning.store.url import redacted
from lightning.trainer.checkpoints import Checkpoints
from lightning.trainer.context import Epoch, epoch_at, read_epochs
from lightning.trainer.model import EARLIER_STEPS, check_policy, earlier_steps, models_in, policies_of
from lightning.trainer.run_stages import API, FORKED, MODEL, Begun, RunStage, Start, began_with
from lightning.trainer.runs import not_loadable
from lightning.types import Json, Run, StepRecord

from lightning_proof.bring_forward import Rewinder

logger = logging.getLogger(__name__)

BETWEEN = "between"
"""The name of the folder for the training state between two config epochs of the other run, while its steps are taken again."""


async def fork(parent: str, into: Path, described: Mapping[str, Json], config: Config, store: str) -> dict[str, Json]:
    """Copy the state of the run `parent` (`RUN@STEP`, or `RUN` for its last step) into the folder `into` of a new run: its
    training state as the checkpoint of step 0, or, if that does not fit the settings, only its model. `RUN/model/NAME@STEP` is
    the model of one of several policies. Return the keys for the new run's configuration that record the fork.

    RUN is a folder, or the name of a folder beside the new run's. `store` is the URL of the parent's store if its folder has
    none. `described` is the description of the new run's settings. Raises `ConfigError`, which lists the existing ones, for a
    run or a step that does not exist or cannot be computed again.
    """
    async with _opened(parent, into, store) as theirs:
        run, step, folder, records, epochs = theirs.run, theirs.step, theirs.folder, theirs.records, theirs.epochs
        target = Checkpoints(into / "checkpoints", keep=1).path(0)
        theirs_then = epoch_at(epochs, max(1, step)).config
        lost = await not_loadable(theirs_then, described, records[:step])
        if theirs_then.get("head") and not described["head"]:  # a resume keeps it; a fork begins without
            lost.append("head")
        model = Path(str(run.config["model"] if "model" in lost else described["model"]))
        if theirs.policy or policies_of(theirs_then) != policies_of(described):
            lost.append("policies")
        if lost:
            check_policy(run, folder, theirs.policy, step)
        if (folder / MODEL).is_dir():  # a fork itself, of a model that is in no other folder
            model, lost = folder / MODEL, [*lost, "model"]
        for old in (target, into / MODEL):  # left over from a start that was interrupted
            shutil.rmtree(old, ignore_errors=True)
        if lost:
            logger.warning(
                "the training state of %s@%d does not fit other settings of %s: the run begins with its weights, and with a "
                "fresh optimizer",
                run.id,
                step,
                ", ".join(lost),
            )
            await theirs.export(into / MODEL, model, config, into / BETWEEN)
        elif theirs.checkpoints.newest(step) == step:
            try:
                await asyncio.to_thread(shutil.copytree, theirs.checkpoints.path(step), target)
            except OSError as error:
                raise theirs.lost(error) from error
        else:
            await theirs.make(lambda brought: brought.save(target), model, config, into / BETWEEN)
        earlier = {} if lost else {EARLIER_STEPS: earlier_steps(run.config) + step}
        return {FORKED: f"{theirs.name}@{step}", **earlier}


async def export_step(parent: str, into: Path, target: Path, config: Config, store: str) -> None:
    """Write the model of the run `parent` at its step (`RUN@STEP`, as for `fork`) to the folder `target`. `into` is the folder
    of the run that needs it. Raises `ConfigError` as `fork` does."""
    async with _opened(parent, into, store) as theirs:
        check_policy(theirs.run, theirs.folder, theirs.policy, theirs.step)
        await theirs.export(target, model_of(theirs.run, theirs.folder), config, into / BETWEEN)


@dataclass(frozen=True, slots=True)
class RunAt:
    """A recorded run at one of its steps, with its opened store; `policy` names one of its several policies, or none."""

    store: Store
    run: Run
    step: int
    folder: Path
    records: Sequence[StepRecord]
    epochs: Sequence[Epoch]
    policy: str = ""

    @property
    def name(self) -> str:
        """The run's id, and the policy that is named."""
        return f"{self.run.id}/model/{self.policy}" if self.policy else self.run.id

    @property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints of the run."""
        return Checkpoints(self.folder / "checkpoints", keep=1)

    @property
    def there(self) -> str:
        """The steps of the run that have a checkpoint, as a text for errors."""
        return ", ".join(f"{self.run.id}@{saved}" for saved in self.checkpoints.steps()) or "none"

    async def export(self, target: Path, model: Path, config: Config, between: Path) -> None:
        """Write the model at the step, of the named policy if the run has several, to the folder `target`. Raises `ConfigError`
        as `make` does."""

        def export(engine: Engine) -> None:
            target.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
                models_in(engine.export(Path(scratch) / "model"))[self.policy].rename(target)

        await self.make(export if self.policy else lambda engine: engine.export(target), model, config, between)

    async def make(self, use: Callable[[Engine], object], model: Path, config: Config, between: Path) -> None:
        """Call `use` (in a thread) with an engine that has the run's state at the step. `model` is the model that the run began
        with, `config` has the settings of this machine, and `between` is a temporary folder. Raises `ConfigError`, which lists
        the checkpoints, if the state cannot be computed again."""
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
        """Return the error which says that the run's state at the step cannot be computed again."""
        return ConfigError(f"{self.name}@{self.step} cannot be made again ({error}). Checkpoints: {self.there}")


def model_of(run: Run, folder: Path) -> Path:
    """Return the folder of the model that a run began with; it may not exist any more. `folder` is the run's folder."""
    return folder / MODEL if (folder / MODEL).is_dir() else Path(str(run.config.get("model", "nowhere")))


@asynccontextmanager
async def _opened(parent: str, into: Path, store: str) -> AsyncIterator[RunAt]:
    name, at, text = split_reference(parent, "@", into.parent)
    if at and not text.isdecimal():
        raise ConfigError(
            f"{parent!r} names no step of a run: write RUN@STEP, as runs/first@20, or RUN for its last step"
        )
    folder, policy = _folder(name, into)
    url = store_in(folder) if (folder / "lightning.db").is_file() else store or store_in(folder)
    async with plugins().opened_store(url) as opened:
        run = await opened.get_run(run_id_of(folder))
        if run is None:
            raise ConfigError(f"the store of {folder} does not know its run: give the --store that it was trained with")
        records, epochs = await opened.steps(run.id), await read_epochs(opened, run)
        step = int(text) if text else len(records)
        if step > len(records):
            raise ConfigError(f"run {run.id} has {len(records)} committed steps: there is no {run.id}@{step}")
        yield RunAt(opened, run, step, folder, records, epochs, policy)


def _folder(name: str, into: Path) -> tuple[Path, str]:
    """Return the folder of a run, and the policy that is named."""
    tried = [Path(name), into.parent / name]
    for folder, policy in map(policy_in, tried):
        if store_in(folder):
            return folder, policy
    there = sorted(run.parent.name for run in into.parent.glob("*/run.json"))
    raise ConfigError(
        f"no run {redacted(name)!r}: neither {tried[0]} nor {tried[1]} is a run's folder; {into.parent} has "
        f"{', '.join(there) or 'none'}"
    )


class Forks(RunStage):
    """The run stage that starts a run from another run's state (`--from`)."""

    api = API

    async def begun(self, start: Start, parent: str) -> Begun:
        """Prepare the model and the checkpoint that a run starts from. `parent` is the value of `--from`; it may be empty for a
        fork that is resumed. Raises `ConfigError` as `fork` does, and for a resumed run that began with other weights."""
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
    """Raise `ConfigError` if a resumed run began with other weights than those of `parent`; an empty `parent` is always
    right."""
    if parent and not began_with(run, parent, folder):
        raise ConfigError(
            f"run {run.id!r} began with the weights of {run.config[FORKED]}, not of {parent}: leave --from out to go on "
            "with it, or give another `out`"
        )
