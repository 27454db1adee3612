"""The points at a step where stages of plugins are asked, between computation and commit, and what happens when a stage fails.

The invariant: stages fail closed. A step on which a stage fails is not committed: the run ends with the plugin's name, and a
resume takes the step again. A stage adds to a step under its own name, and changes nothing of it. A stage that is only told of
something is logged and passed over when it fails.

    begun      the run begins, or goes on after some steps
    taken      the engine has taken a step, which is not committed yet: add metrics, context and alarms
    evaluated  held-out tasks were run: give alarms
    ends       a step is about to begin: say why the run is to end before it
    alarmed    a stage gave a serious alarm: be told of it
    ended      the run ends: finish what is under way
    rehearsed  `Trainer.dev` and `lightning train --dev`: run a few tasks without training, and report
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Final, Protocol, Self, TypeAlias

from lightning.bounded import SAID, Bounded
from lightning.errors import ConfigError, PluginError, StoreError
from lightning.plugins import plugins
from lightning.plugins.stages import Contract, NamedStage, Stage, StageLine
from lightning.types import Json

if TYPE_CHECKING:
    from lightning.algorithms.protocol import Algorithm, Batch, SearchAlgorithm
    from lightning.batch.trajectory import Group
    from lightning.config import Config
    from lightning.gateway.calls import Parts
    from lightning.trainer.stack import Stack
    from lightning.trainer.summary import Evaluation, Reporter
    from lightning.types import Rollout, Task

log = logging.getLogger(__name__)

API: Final = 1
"""The version of the contract between a run's steps and their stages. A minor release raises it when a stage written for the
old version would behave differently, and the change log says what to change in a stage."""
NOT_NAMES: Final = ("dropped", "eval", "pipeline", "policy_fault", "reward", "seconds", "skipped")
"""The beginnings of the trainer's own metrics, which no stage that adds metrics may have as its name."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """What a stage says to the person who trains. `cause` is the same for what has one cause, so that it is said once; `text`
    has the cure. A `serious` one is a reason to look before training goes on: trackers and `StepStage.alarmed` hear of it.

    `steps` and `rollouts` (their ids) are what it rests on, empty where that is all that was looked at.
    """

    cause: str
    text: str
    serious: bool = False
    steps: tuple[int, ...] = ()
    rollouts: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Json]:
        """Return the alarm's content, ready for `json.dumps`."""
        return {
            "cause": self.cause,
            "text": self.text,
            "serious": self.serious,
            "steps": list(self.steps),
            "rollouts": list(self.rollouts),
        }


@dataclass(frozen=True, slots=True)
class StepTaken:
    """A step that the engine has taken. `rollouts` are all that were sampled for it, failed ones included, `groups` those from
    which the `batch` was made, and `metrics` its numbers so far. `parts` are those of the run's gateway, whose `line` has the
    plugin's own stage of calls (`Line.named`); None where a stage is tried without a run. A stage must not change any of
    these."""

    step: int
    rollouts: Sequence[Rollout]
    groups: Sequence[Group]
    batch: Batch
    metrics: Mapping[str, float]
    train_agents: Sequence[str] = ()
    parts: Parts | None = None


@dataclass(frozen=True, slots=True)
class Added:
    """The additions of a stage to a step. A metric `share` of the stage `mine` is recorded as `mine/share`; `context` is any
    JSON, recorded in the step's context under the stage's name."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    context: Json = None
    alarms: Sequence[Alarm] = ()


class DryRun(Protocol):
    """The findings of a dry run, in words, with the cures."""

    @property
    def problems(self) -> Sequence[str]:
        """The reasons why training cannot start."""

    @property
    def hints(self) -> Sequence[str]:
        """Findings that deserve a look but do not stop training."""

    @property
    def ok(self) -> bool:
        """Whether training can start."""


Rehearse: TypeAlias = (
    "Callable[[Stack, Sequence[Task], Sequence[str], Algorithm | SearchAlgorithm, Reporter], Awaitable[DryRun]]"
)
"""The type of `StepStage.rehearsed`."""


class StepStage(Stage):
    """A plugin's stage at the steps of a run. Each run makes its own. A subclass overrides the methods of the points where it
    is to be asked. The awaited methods run on the event loop that also answers the agents' requests: leave slow work to a
    thread."""

    async def begun(self, steps: Sequence[Mapping[str, float]], evaluations: Sequence[Evaluation]) -> Iterable[Alarm]:
        """Prepare for a run that begins, or resumes after these steps and evaluations. Return the alarms that these give: they
        were reported before, and are not reported again."""
        return ()

    async def taken(self, step: StepTaken) -> Added | None:
        """Return what to add to a step that the engine has taken and that is about to be committed; None for nothing."""

    async def evaluated(self, evaluations: Sequence[Evaluation]) -> Iterable[Alarm]:
        """Return alarms about an evaluation of the held-out tasks. `evaluations` are all so far that can be compared, the new
        one last."""
        return ()

    def ends(self) -> str:
        """Return why the run is to end before its next step, as if the last one were the last of `trainer.steps`; "" to go on.
        Asked before each step of `Trainer.fit`."""
        return ""

    def alarmed(self, alarm: Mapping[str, Json]) -> None:
        """React to a serious alarm of a stage: `Alarm.to_json` with `run` and `step`. Return at once."""

    async def ended(self) -> None:
        """Clean up when the run ends, in whatever way it ends."""

    async def rehearsed(
        self,
        stack: Stack,
        tasks: Sequence[Task],
        train_agents: Sequence[str],
        algorithm: Algorithm | SearchAlgorithm,
        reporter: Reporter,
    ) -> DryRun:
        """Run the tasks without training, and show what was found. At most one stage of a run may have this method."""
        raise NotImplementedError


CONTRACT: Final = Contract(
    kind=StepStage,
    asked="step_stages",
    api=API,
    points=("begun", "taken", "evaluated", "ends", "alarmed", "ended", "rehearsed"),
    ordered=("taken",),
    setting="trainer.stage_order",
    error=PluginError,
    of="steps",
    where="trainer",
    passes=(StoreError,),
    cure="Mend the plugin and resume the run, or resume it without the stage",
    alone=(("rehearsed", "make dry runs"),),
)


class StepLine(StageLine[StepStage]):
    """The stages of a run, in order (`trainer.stage_order`). Use it with `async with`, which calls `ended` of each stage.
    Raises `PluginError`, as a `StageLine` does, and for a stage named as the trainer's own metrics are."""

    contract = CONTRACT

    def __init__(self, stages: Sequence[NamedStage[StepStage]] = (), order: Sequence[str] = ()) -> None:
        super().__init__(stages, order)
        for each in self.stages:
            if each.name in NOT_NAMES:
                raise PluginError(
                    f"the stage {each.said} has the name with which the trainer's own metrics begin ({each.name}/...): its "
                    f"author registers it under another one; until then set {each.off}"
                )
        self._said = Bounded[tuple[str, str], int](SAID)
        """The step at which a stage's alarm of a cause was reported; 0 if it was reported beside a step."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in self.at("ended"):
            with _heard(each, "ended"):
                await each.stage.ended()

    async def begin(self, steps: Sequence[Mapping[str, float]], evaluations: Sequence[Evaluation]) -> None:
        """Call `StepStage.begun` of each stage. Raises `StageError`."""
        for each in self.at("begun"):
            with CONTRACT.blaming(each, "begun", "the begin of the run"):
                self._new(each, await each.stage.begun(steps, evaluations))

    async def taken(self, step: StepTaken) -> Added:
        """Return all that the stages add to a step (`StepStage.taken`): the metrics, the context by the stages' names, and
        alarms of causes that were not reported before. If the step is not committed and is taken again, its alarms are
        reported again. Raises `StageError`."""
        metrics: dict[str, float] = {}
        context: dict[str, Json] = {}
        alarms: list[Alarm] = []
        for each in self.at("taken"):
            seen = MappingProxyType({**step.metrics, **metrics})
            with CONTRACT.blaming(each, "taken", f"step {step.step}, which is not committed"):
                added = await each.stage.taken(replace(step, metrics=seen)) or Added()
                metrics |= {f"{each.name}/{name}": _number(name, value) for name, value in added.metrics.items()}
                json.dumps(added.context, allow_nan=False)
                alarms += self._new(each, added.alarms, step.step)
            context |= {} if added.context is None else {each.name: added.context}
        return Added(metrics, context, alarms)

    async def evaluated(self, evaluations: Sequence[Evaluation]) -> list[Alarm]:
        """Return the stages' alarms about an evaluation, of causes that were not reported before. Raises `StageError`."""
        alarms: list[Alarm] = []
        for each in self.at("evaluated"):
            with CONTRACT.blaming(each, "evaluated", "an evaluation"):
                alarms += self._new(each, await each.stage.evaluated(evaluations))
        return alarms

    def ends(self) -> str:
        """Return why the run is to end before its next step; "" to go on. Raises `StageError`."""
        for each in self.at("ends"):
            with CONTRACT.blaming(each, "ends", "the begin of a step"):
                if why := each.stage.ends():
                    return why
        return ""

    def alarmed(self, alarm: Mapping[str, Json]) -> None:
        """Tell each stage of a serious alarm. Raises nothing."""
        for each in self.at("alarmed"):
            with _heard(each, "alarmed"):
                each.stage.alarmed(dict(alarm))

    def rehearsal(self) -> Rehearse:
        """Return `StepStage.rehearsed` of the stage that has it. Raises `ConfigError` if no stage has."""
        for each in self.at("rehearsed"):
            return each.stage.rehearsed
        raise ConfigError(
            f"a dry run needs a plugin that makes it, and there is none: the stages of steps here are "
            f"{', '.join(self.versions) or 'none'}.{plugins().cures('step_stages', 'rehearsed')}"
        )

    def _new(self, each: NamedStage[StepStage], alarms: Iterable[Alarm], step: int = 0) -> list[Alarm]:
        """Return the alarms of causes that were not reported before; a cause that was reported at the same step is new, since
        that step was not committed. `step` is 0 for alarms beside a step."""
        new: dict[str, Alarm] = {}
        for alarm in alarms:
            said = self._said.get((each.name, alarm.cause))
            if said is None or said == step > 0:
                new.setdefault(alarm.cause, alarm)
        for cause in new:
            self._said.keep((each.name, cause), step)
        return [*new.values()]


def _number(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError(f"the metric {name!r} is {value!r} and no number: leave out what was not measured")
    return float(value)


@contextmanager
def _heard(each: NamedStage[StepStage], point: str) -> Iterator[None]:
    """Log an exception of a stage in the block, so that training goes on."""
    try:
        yield
    except Exception:
        log.exception("the stage %s failed (%s); training goes on", each.said, point)


def step_line(config: Config) -> StepLine:
    """Make the stages that plugins register, for a run with these settings. Raises what `Contract.made` raises."""
    return StepLine(CONTRACT.made(config), config.trainer.stage_order)
