"""Find the model that a user names for `lightning branch`, `eval` or `ab`: a model, a run's step, a version of a run's weights.

The invariant: the weights are exactly the named ones, or an error says which ones exist. A step's weights come from its
checkpoint or are computed again from the store; the files of a version are compared with its digests. A run's record may come
from a stranger, so no model that it names is fetched: those that its policies began as must be on this machine, as its own.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from lightning.cli.output import answers, with_store
from lightning.config import Config
from lightning.engines.files import whole_folder
from lightning.engines.protocol import Engine, WritesAdapters
from lightning.errors import ConfigError
from lightning.policy_server.model_folder import ADAPTERS_OF_ALL
from lightning.policy_server.policies import PolicySet
from lightning.store.places import existing_store, policy_in, run_id_of, split_reference, store_in
from lightning.store.protocol import Store
from lightning.store.url import redacted
from lightning.trainer.agents import of_project
from lightning.trainer.checkpoints import Checkpoints
from lightning.trainer.context import Epoch, base_digest, is_over, read_epochs
from lightning.trainer.model import check_policy, models_in, policies_of, policy_set_of, resolve_model
from lightning.trainer.run_stages import FORKED, MODEL
from lightning.trainer.summary import BEST
from lightning.types import POLICY, Json, Run
from lightning_proof.fork import RunAt, model_of
from lightning_resources.nouns import ResourceKind
from lightning_resources.operations import list_resources
from lightning_resources.reference import ResourceReference, find, parse_reference
from lightning_resources.weights import WEIGHTS_NAME, checked_weights, is_weights_name, weights_name

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EvaluatedModel:
    """The folder of a model, and its name: the name that the user gave, completed with the step or version. `place` is the
    run's folder, or the store of the named weights without passwords; empty for a model that belongs to no run. `weights` is
    the resource that has models of this policy as versions. `several` are the policies of a run that answer their agents
    together; `folder` then is the model that the run began with, and `trained` the file or folder with the weights of all
    trained policies, None before the first step."""

    name: str
    folder: Path
    place: str = ""
    weights: str = WEIGHTS_NAME
    several: PolicySet | None = None
    trained: Path | None = None

    def within(self, config: Config) -> Config:
        """Return settings with the policies of this model in place of their own."""
        return config if self.several is None else self.several.within(config)

    def serves_as(self, other: EvaluatedModel) -> bool:
        """Whether the same servers with the same weights answer for both."""
        ours, theirs = ((each.folder, each.trained, _told(each.several)) for each in (self, other))
        return ours == theirs

    @property
    def title(self) -> str:
        """The name, followed by its place if it has one, so that two models of one name can be told apart."""
        return f"{self.name} of {self.place}" if self.place else self.name


def _told(several: PolicySet | None) -> tuple[object, ...]:
    """Return what two sets of policies have in common that the same servers answer."""
    if several is None:
        return ()
    globs = {name: tuple(found) for name, found in several.globs.items()}
    return dict(several.bases), dict(several.adapters), globs, tuple(several.untrained)


def find_model(what: str, runs: Path, into: Path, config: Config, *, together: bool = False) -> EvaluatedModel:
    """Return the model that `what` names: a folder or a hub's name, RUN or RUN@STEP, or [PLACE#]policy/weights@ALIAS.

    Of a run with several policies, RUN/model/NAME is the model of one, and RUN/model/NAME@STEP its model after a step; RUN and
    RUN@STEP are all of them, if they can be `together`. Weights that have to be computed again are written below `into`, once.
    `runs` is the folder in which names of runs are looked up. Raises `ConfigError` or `StoreError`, which lists the existing
    ones, for a model that does not exist.
    """
    if split_reference(what, "#", runs)[1]:
        reference = parse_reference(what)
        return _of_resource(existing_store(reference.place), reference)
    run, at, which = split_reference(what, "@", runs)
    tried = [Path(run), runs / run]
    if found := next((each for each in map(policy_in, tried) if store_in(each[0])), None):
        folder, policy = found
        if at and not which.isdecimal():
            raise ConfigError(
                f"{what!r} names no step of a run: write RUN@STEP, as {run}@20, or for its weights {run}#{WEIGHTS_NAME}@{which}"
            )
        folder, url, step = folder.resolve(), store_in(folder), int(which) if at else None
        named = policy or (None if together else "")
        return asyncio.run(
            with_store(
                url, lambda store: _of_run(store, run_id_of(folder), folder, named, step, into.resolve(), config)
            )
        )
    if not at and not is_weights_name(what):
        try:
            return EvaluatedModel(what, resolve_model(what))
        except ConfigError as error:
            raise ConfigError(
                f"{error}; and there is no run at {tried[0]} or {tried[1]} (`lightning runs` lists what there is)"
            ) from error
    asked = answers(str(runs), lambda _, store: list_resources(store, run)) if runs.exists() else ()
    having = [url for url, found in asked if found]
    if not having:
        raise ConfigError(
            f"{what!r} cannot be evaluated: there is no run at {tried[0]} or {tried[1]}, and no store in {runs} has a resource "
            f"{run!r} (`lightning runs` and `lightning resources ls` list what there is)"
        )
    if len(having) > 1:
        raise ConfigError(f"{len(having)} runs in {runs} have {run!r}: write PLACE#{what}, as {runs}/NAME#{what}")
    return _of_resource(having[0], parse_reference(what))


def _of_resource(url: str, reference: ResourceReference) -> EvaluatedModel:
    resource = asyncio.run(with_store(url, lambda store: find(store, reference)))
    name = f"{resource.name}@{resource.version}"
    if resource.kind is not ResourceKind.WEIGHTS:
        raise ConfigError(f"{name} is a {resource.kind.value}, not weights: only a model can be evaluated")
    return EvaluatedModel(name, checked_weights(resource), redacted(url), resource.name)


async def model_at(
    store: Store, run: Run, folder: Path | None, step: int, into: Path, config: Config
) -> EvaluatedModel:
    """Return a run's model after `step` steps, all its policies together if it has several.

    `folder` is the run's folder; None if it is not on this machine. Raises `ConfigError` if this model is not there and cannot
    be made again.
    """
    if folder is None:
        if step:
            raise ConfigError(
                f"the folder of the run {run.id} is not here, and with it its weights after {step} steps: name them (--weights)"
            )
        return EvaluatedModel(f"{run.id}@0", _base(run, None))
    return await _of_run(store, run.id, folder, None, step, into, config)


async def model_of_run(
    store: Store, run: Run, folder: Path | None, step: int, into: Path, config: Config
) -> tuple[EvaluatedModel, str]:
    """Return a run's model as `model_at` does, and an empty text; or, if that model is lost, the model of the nearest step, and
    a warning about it. Raises `ConfigError` if no model of the run is left.
    """
    if folder is None:
        return await model_at(store, run, None, step, into, config), ""
    last = len(await store.steps(run.id))
    if step > last:
        raise ConfigError(
            f"the call to branch at was answered by version {step} of the policy, but the run {run.id} has only {last} "
            "committed steps: name the weights for the branches (--weights)"
        )
    try:
        return await model_at(store, run, folder, step, into, config), ""
    except ConfigError as error:
        lost = error
    saved = Checkpoints(folder / "checkpoints", keep=1).steps()
    for other in sorted({0, last, *saved} - {step}, key=lambda each: (abs(each - step), each)):
        try:
            found = await model_at(store, run, folder, other, into, config)
        except ConfigError:
            continue
        return found, f"{run.id}@{step} is not there any more ({lost}); the nearest that is there is {found.name}"
    raise lost


async def _of_run(
    store: Store, name: str, folder: Path, policy: str | None, step: int | None, into: Path, config: Config
) -> EvaluatedModel:
    """Return the model of `policy` after a step of a run, "" for the one policy of a run, None for all its policies."""
    run = await store.get_run(name)
    if run is None:
        raise ConfigError(
            f"the store of {folder} has no run {name}: its training ended before the run began, or the folder's "
            "run.json was changed"
        )
    records, epochs, place = await store.steps(run.id), await read_epochs(store, run), str(folder)
    if step is not None and step > len(records):
        raise ConfigError(f"run {run.id} has {len(records)} committed steps: there is no {run.id}@{step}")
    final = folder / "model"
    delivered = bool(models_in(final)) and await is_over(store, run.id)
    kept = await _kept(store, run, folder, epochs, len(records)) if delivered else len(records)
    at = kept if step is None else step
    several = policy_set_of(run.config)
    there = RunAt(store, run, at, folder, records, epochs)
    begins = not at and there.checkpoints.newest(0) is None  # with the models that the policies begin as
    which_run = hashlib.sha256(f"{place} {run.created_at}".encode()).hexdigest()[:8]  # of those of the same name
    made = into / f"{run.id}@{at}-{which_run}"
    if policy is None and several is not None:
        _check_begin(there)
        several = _policies_here(run, several)
        base, exported = _base(run, folder), final / ADAPTERS_OF_ALL if delivered and 0 < at == kept else None
        weights = None if begins else await _of_all(there, made.with_name(f"{made.name}-all"), base, config, exported)
        return EvaluatedModel(f"{run.id}@{at}", base, place, several=several, trained=weights)
    check_policy(run, folder, policy or "", at)

    def found_in(model: Path) -> EvaluatedModel:
        own = f"{run.id}/{final.name}/{policy}" if policy else run.id
        return EvaluatedModel(f"{own}@{at}", models_in(model)[policy or POLICY], place, weights_name(policy or POLICY))

    if models_in(made):  # an evaluation that is resumed began with it
        return found_in(made)
    if delivered and at and at == kept:
        return found_in(final)
    own = several.bases.get(policy) if several is not None and policy else None
    _check_begin(there)
    base = _base(run, folder)
    if begins:
        name = f"{run.id}/{final.name}/{policy}@0" if own else f"{run.id}@0"
        return EvaluatedModel(name, resolve_model(own, fetch=False) if own else base, place)
    await _make(there, made, lambda engine, folder: engine.export(folder), base, config)
    return found_in(made)


def _policies_here(run: Run, several: PolicySet) -> PolicySet:
    """Return the policies of a run with the folders of the models that they begin as. Raises `ConfigError` for one that is not
    on this machine."""
    said = run.config.get("config")
    own = said.get("policies") if isinstance(said, Mapping) else None
    if not several.bases or not isinstance(said, Mapping) or not isinstance(own, Mapping):
        return several
    here: dict[str, Json] = {}
    for name, policy in own.items():
        here[name] = policy
        if name in several.bases and isinstance(policy, Mapping):
            try:
                here[name] = {**policy, "base": str(resolve_model(several.bases[name], fetch=False))}
            except ConfigError as error:
                raise ConfigError(f"the policy {name} of the run {run.id}: {error}") from error
    return policy_set_of({**run.config, "config": {**said, "policies": here}}) or several


async def _of_all(there: RunAt, made: Path, base: Path, config: Config, exported: Path | None) -> Path:
    """Return the weights of all policies of a run at a step: the `exported` file, if all are adapters of one base, else what an
    engine with the state of the step writes below `made`. Raises `ConfigError` if the base has changed."""
    digest = there.records[there.step - 1].context.get("base") if there.step else None
    if digest is not None and digest != await asyncio.to_thread(base_digest, base):
        raise ConfigError(
            f"the model in {base} is not the one that the policies of {there.run.id} began as: its weights have changed. Bring "
            "them back"
        )
    if exported is not None and await asyncio.to_thread(exported.is_file):
        return exported
    file = made / ADAPTERS_OF_ALL

    def write(engine: Engine, folder: Path) -> None:
        with whole_folder(folder) as path:
            cast("WritesAdapters", engine).adapters(path / ADAPTERS_OF_ALL)

    await _make(there, made, write, base, config)
    return file if await asyncio.to_thread(file.is_file) else file.with_suffix("")


async def _make(there: RunAt, made: Path, write: Callable[[Engine, Path], object], base: Path, config: Config) -> None:
    """Have an engine with a run's state at a step write the folder `made`, whole or not at all, unless it is there. Raises
    `ConfigError` if the state cannot be computed again."""
    async with _alone(made):
        if not await asyncio.to_thread(made.is_dir):
            await there.make(lambda engine: write(engine, made), base, config, made.with_name(f"{made.name}.between"))


def _check_begin(there: RunAt) -> None:
    """Raise `ConfigError` for a step that has to be made again from the weights of a fork that has not kept them."""
    run = there.run
    kept = FORKED not in run.config or (there.folder / MODEL).is_dir()  # else the run's model is that before the fork
    if not kept and there.checkpoints.newest(there.step) is None:
        raise ConfigError(
            f"run {run.id} began with the weights of {run.config[FORKED]}, which it has not kept, so that "
            f"{run.id}@{there.step} cannot be made again: name {run.config[FORKED]} itself for the beginning, or a step from a "
            f"checkpoint on. Checkpoints: {there.there}"
        )


@asynccontextmanager
async def _alone(made: Path) -> AsyncIterator[None]:
    """Hold a lock on a folder while it is made, so that another process or thread that makes the same folder waits. The kernel
    releases the lock when the process ends. Raises `ConfigError` if the folder cannot be written."""
    try:
        made.parent.mkdir(parents=True, exist_ok=True)
        lock = made.with_name(f".{made.name}.lock").open("w")
    except OSError as error:
        raise ConfigError(f"cannot write {made}: {error}. Give another --out") from error
    with lock:
        waits = False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waits:
                    logger.warning("another process makes %s: waiting for it", made)
                waits = True
                await asyncio.sleep(0.1)
            except OSError as error:
                raise ConfigError(f"cannot lock {made}: {error}. Give another --out") from error
        yield


async def _kept(store: Store, run: Run, folder: Path, epochs: Sequence[Epoch], last: int) -> int:
    """Return the step of a run's final model: the last step, or with `trainer.keep = "best"` the step of the best
    evaluation."""
    if epochs[-1].setting("trainer", "keep") != "best":
        return last
    if len(steps := Checkpoints(folder / BEST, keep=1).steps()) == 1:
        return steps[0]
    name = weights_name(next(iter(policies_of(run.config)), POLICY))
    for resource in reversed(await list_resources(of_project(store, run.project), name)):
        made = resource.metadata
        if made.get("run") == run.id and isinstance(step := made.get("steps"), int):
            return step
    return last


def _base(run: Run, folder: Path | None) -> Path:
    """Return the folder of the model that a run began with; `folder` is the run's, None if it is not on this machine. Raises
    `ConfigError` if the model is gone."""
    base = Path(str(run.config.get("model", ""))) if folder is None else model_of(run, folder)
    if not (base / "config.json").is_file():
        raise ConfigError(f"the model that the run {run.id} began with is not at {base} any more: bring it back there")
    return base.resolve()
