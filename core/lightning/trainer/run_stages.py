"""The points at a run's beginning and end where stages of plugins are asked, and what happens when a stage fails.

The invariant: stages fail closed. A stage that fails ends the run, with its plugin's name as the cause. A prompt, a teacher or
another run's state that only a stage can find is refused before anything starts if that stage is missing, also when a run
resumes.

    prompts     a run begins, a dry run too: find the prompts for its agents
    teacher     a training begins, or resumes: find the teacher of its algorithms
    needs       a training begins, or resumes: say what it needs of memory
    begun       a run begins, or resumes: provide what it starts from in place of its model
    bring_forward
                a training begins, or resumes: offer to take its recorded steps again, so that not each needs a checkpoint
    exported    a run has ended, and its model lies in its folder: tell others
"""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from lightning.algorithms.protocol import Algorithm, teacher_of
from lightning.config import Config
from lightning.engines.protocol import Engine
from lightning.errors import ConfigError, EngineError, LightningError, PluginError
from lightning.plugins import plugins
from lightning.plugins.stages import Contract, Stage, StageLine
from lightning.store.places import policy_in, run_id_of, split_reference
from lightning.store.protocol import Store
from lightning.trainer.agents import of_project
from lightning.trainer.checkpoints import Checkpoints
from lightning.trainer.context import Epoch, Teacher
from lightning.trainer.needs import Need
from lightning.types import Json, Rollout, Run, StepRecord

if TYPE_CHECKING:
    from lightning.trainer.summary import Reporter

API: Final = 1
"""The version of the contract between a run and its stages, with the rules of `lightning.runner.stages.API`."""
PREFIX: Final = "resource:"
"""The beginning of a setting that names a text or a model instead of giving it."""
FORKED: Final = "forked_from"
"""The key of a run's configuration that names the run and the step whose weights it began with."""
MODEL: Final = "forked"
"""The folder, in the run's own, of the model that a forked run starts from if it could not take the training state."""
PROBES: Final = "probes"
"""The key, in `about` of `exported`, of a JSON object that maps a policy's name to its `PROBE`."""
PROBE: Final = "probe"
"""The key, in the metadata of a version of weights, of some tokens and the trainer's logprobs of them. Whoever loads the
weights can check by them that they are computed with: `ids`, `logprobs` (nats, the first is ignored) and their `dtype`."""


BringForward: TypeAlias = Callable[[Engine, Sequence[StepRecord]], Awaitable[None]]
"""Takes recorded steps again on an engine that is opened with the run's settings and has the state before the first of them.
Raises `AuditError` for one that cannot be taken again."""


def began_with(run: Run, parent: str, folder: Path) -> bool:
    """Whether a run in `folder` began with the weights of `parent`, a value of `--from`; an empty one stands for the run's own
    model."""
    theirs, _, step = str(run.config.get(FORKED) or "").rpartition("@")
    name, _, asked = split_reference(parent, "@", folder.parent)
    if not parent or not theirs:
        return not parent and not theirs
    named = {_named(policy_in(Path(name))), _named(policy_in(folder.parent / name))}
    return theirs in named and asked in ("", step)


def _named(parent: tuple[Path, str]) -> str:
    """Return the name of a run, by its folder, and of one of its policies, as `FORKED` has it."""
    folder, policy = parent
    return f"{run_id_of(folder)}/model/{policy}" if policy else run_id_of(folder)


@dataclass
class Prompts:
    """The prompt templates for a run's agents. `own` are texts by component; a stage that finds others derives its own class
    from this. There `bound` names the resources of the other components, and `versions` the versions, by resource, that a
    rollout of this run uses unless it says otherwise."""

    own: Mapping[str, str] = field(default_factory=dict)
    bound: dict[str, str] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)

    async def stamp(self, store: Store, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return the rollouts with the versions of the prompts that they use, and load these prompts."""
        return list(rollouts)

    def of(self, rollout: Rollout) -> dict[str, str]:
        """Return the templates of a rollout, by component."""
        return dict(self.own)

    async def keep(self, store: Store, run: str) -> None:
        """Store the choice of prompts with the run."""


@dataclass(frozen=True, slots=True)
class Start:
    """What is known of a run before anything of it is started. `store` has all projects; `url` is that of the store where it is
    not in the run's `folder`. `run` may not be kept yet, and `described` is what its settings are now. `phases` are its
    algorithms with the first step of each; a search for prompts has none. `requests` is how many agents run at once."""

    store: Store
    run: Run
    described: Mapping[str, Json]
    folder: Path
    model: Path
    phases: Sequence[tuple[int, Algorithm]]
    config: Config
    make_engine: Callable[[Config], Engine]
    url: str
    reporter: Reporter
    requests: int


@dataclass(frozen=True, slots=True)
class Begun:
    """What a run begins with in place of its own model: the folder of a `model`, and a training state, which lies in its folder
    as the checkpoint of step 0. `described` are the keys of the run's configuration that say so, `FORKED` among them."""

    described: Mapping[str, Json]
    model: Path


class RunStage(Stage):
    """A plugin's stage at a run's beginning and end. A subclass overrides the methods of the points where it is to be asked.
    `store` is limited to the run's project. `LightningError`s end the run as they are; any other exception is a failure of the
    plugin."""

    async def prompts(self, store: Store, run: Run, given: Mapping[str, str], home: str) -> Prompts:
        """Find the prompts of a run by its settings `runner.prompts` (`given`). The run may be resumed, and may not be stored
        yet.

        `home` is the URL of the store that names without a place refer to, if that is not `store`. At most one stage may have
        this method.
        """
        raise NotImplementedError

    async def teacher(self, start: Start) -> Teacher:
        """Find the teacher that the run's algorithms ask for (`teacher_of`). Check that it exists, fits the model and the
        engine, and is the teacher of the steps that were taken. At most one stage may have this method."""
        raise NotImplementedError

    async def needs(self, start: Start) -> Sequence[Need]:
        """What the run needs of a memory, such as that of GPUs. Nothing is said of what cannot be counted."""
        raise NotImplementedError

    async def begun(self, start: Start, parent: str) -> Begun:
        """Prepare what a run starts from. `parent` is the value of `--from`; it is empty when a run resumes that started so. An
        error here leaves the run as it was. At most one stage may have this method."""
        raise NotImplementedError

    async def bring_forward(
        self, start: Start, records: Sequence[StepRecord], epochs: Sequence[Epoch], teacher: Teacher | None
    ) -> BringForward:
        """What takes the run's recorded steps again, those since its newest checkpoint. With such a stage a step may be
        committed without one. `start` has the model that the run begins with, `records` and `epochs` are all of it, `teacher`
        is its present one. Where the engine has to be opened with other settings, or another teacher, to take steps again, they
        are taken here, and a checkpoint of the last one lies in the run's folder then. One stage may stand here."""
        raise NotImplementedError

    async def exported(self, store: Store, run: Run, folder: Path, about: Mapping[str, Json]) -> None:
        """Tell others that the run's model lies in a folder. `about` says how it was made."""


CONTRACT: Final = Contract(
    kind=RunStage,
    asked="run_stages",
    api=API,
    points=("prompts", "teacher", "needs", "begun", "bring_forward", "exported"),
    ordered=(),
    setting="",
    error=PluginError,
    of="runs",
    where="trainer",
    failed=PluginError,
    alone=(
        ("prompts", "find the prompts of runs"),
        ("teacher", "find the teachers of runs"),
        ("begun", "bring what runs begin with"),
        ("bring_forward", "take recorded steps again"),
    ),
)


class RunLine(StageLine[RunStage]):
    """The stages of a run. Raises `PluginError`, as a `StageLine` does."""

    contract = CONTRACT

    def check(self, config: Config) -> None:
        """Raise `ConfigError` for settings that only a stage can carry out, where none is there."""
        self.check_prompts(config.runner.prompts)
        if (every := config.trainer.checkpoint_every or 1) > 1 and not self.at("bring_forward"):
            raise ConfigError(
                CONTRACT.not_carried_out(
                    f"trainer.checkpoint_every = {every} leaves steps that a resume has to take again",
                    "bring_forward",
                    self.versions,
                    "set trainer.checkpoint_every = 1",
                )
            )

    def check_prompts(self, given: Mapping[str, str]) -> None:
        """Raise `ConfigError` for a prompt that only a stage can find, if no stage does."""
        named = next((item for item in given.items() if item[1].startswith(PREFIX)), None)
        if named and not self.at("prompts"):
            raise ConfigError(
                f"runner.prompts.{named[0]} is {named[1]!r}, which names a prompt, and no plugin is there that finds it."
                f"{plugins().cures('run_stages', 'prompts')} Or give the text itself"
            )

    async def prompts(self, store: Store, run: Run, given: Mapping[str, str], *, home: str = "") -> Prompts:
        """Return the prompts of a run (`RunStage.prompts`). Raises `ConfigError` where no stage finds what is named."""
        self.check_prompts(given)
        for each in self.at("prompts"):
            with CONTRACT.blaming(each, "prompts"):
                return await each.stage.prompts(of_project(store, run.project), run, given, home)
        return Prompts(given)

    async def teacher(self, start: Start) -> Teacher | None:
        """Return the teacher of a run; None for algorithms that ask for none. Raises `ConfigError` where no stage finds it."""
        wanted = [(algorithm.name, name) for _, algorithm in start.phases if (name := teacher_of(algorithm))]
        if not wanted:
            return None
        for each in self.at("teacher"):
            with CONTRACT.blaming(each, "teacher"):
                return await each.stage.teacher(start)
        raise ConfigError(
            CONTRACT.not_carried_out(
                f"the algorithm {wanted[0][0]} learns from the teacher {wanted[0][1]}",
                "teacher",
                self.versions,
                "take another algorithm",
            )
        )

    async def needs(self, start: Start) -> list[Need]:
        """Return what the stages say that the run needs (`RunStage.needs`)."""
        found: list[Need] = []
        for each in self.at("needs"):
            with CONTRACT.blaming(each, "needs"):
                found += await each.stage.needs(start)
        return found

    async def begun(self, start: Start, parent: str | None) -> Begun | None:
        """Return what a run starts from (`parent`, see `RunStage.begun`), or has started from when it resumes; None for its own
        model. Raises `ConfigError` where no stage provides it."""
        before = start.run.config.get(FORKED)
        if parent is None and before is None:
            return None
        for each in self.at("begun"):
            with CONTRACT.blaming(each, "begun"):
                return await each.stage.begun(start, parent or "")
        said, cure = f"the run is to begin with the weights of {parent} (--from)", "leave it out"
        if before is not None:
            said, cure = f"run {start.run.id!r} began with the weights of {before}", "give another `out`"
        raise ConfigError(CONTRACT.not_carried_out(said, "begun", self.versions, cure))

    async def bring_forward(
        self, start: Start, records: Sequence[StepRecord], epochs: Sequence[Epoch], teacher: Teacher | None
    ) -> BringForward | None:
        """What takes the run's recorded steps again, see `RunStage.bring_forward`; None where no stage does. Raises
        `ConfigError` for a run that needs it then: a step that taught is newer than the newest checkpoint."""
        if not (standing := self.at("bring_forward")):
            saved = Checkpoints(start.folder / "checkpoints", keep=1).newest(len(records)) or 0
            if taught := [record.step for record in records[saved:] if record.metrics.get("stepped", 1.0)]:
                raise ConfigError(
                    CONTRACT.not_carried_out(
                        f"step {taught[0]} of {start.run.id!r} has no checkpoint, so that a resume has to take it again",
                        "bring_forward",
                        self.versions,
                        "give another `out`",
                    )
                )
            return None
        with CONTRACT.blaming(standing[0], "bring_forward"), _blaming_engine():
            take_again = await standing[0].stage.bring_forward(start, records, epochs, teacher)

        async def bring_forward(engine: Engine, records: Sequence[StepRecord]) -> None:
            with CONTRACT.blaming(standing[0], "bring_forward"), _blaming_engine():
                await take_again(engine, records)

        return bring_forward

    async def exported(self, store: Store, run: Run, folder: Path, about: Mapping[str, Json]) -> None:
        """Tell each stage where the run's model lies (`RunStage.exported`)."""
        for each in self.at("exported"):
            with CONTRACT.blaming(each, "exported"):
                await each.stage.exported(of_project(store, run.project), run, folder, about)


@contextmanager
def _blaming_engine() -> Iterator[None]:
    """Turn an exception that an engine raised in the block into an `EngineError`, so that the stage that called the engine is
    not blamed for it. Other exceptions are raised as they are."""
    try:
        yield
    except Exception as error:
        callers = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
        if isinstance(error, LightningError) or not any(issubclass(type(each), Engine) for each in callers):
            raise
        raise EngineError(
            f"the engine failed when recorded steps were taken again ({type(error).__name__}: {error}). Nothing that was "
            "recorded is lost: mend the cause and resume the run; if memory ran out, lower engine.tokens_per_microbatch"
        ) from error


def run_line(config: Config) -> RunLine:
    """Make the stages that plugins register, for a run with these settings. Raises what `Contract.made` and `RunLine` raise."""
    return RunLine(CONTRACT.made(config))
