"""Where plugins stand at a step, between its computation and its commit: the points, and what happens when a stage fails.

The invariant: stages fail closed. A step on which a stage fails is not committed: the run ends with the plugin's name, and a
resume takes the step again. A stage adds to a step under its own name, and changes nothing of it. A stage that only hears of
something is logged and passed over when it fails.

    begun      the run begins, or goes on after some steps
    taken      the engine has taken a step, which is not committed yet: add metrics, context and alarms
    evaluated  held-out tasks were run: give alarms
    alarmed    a stage gave a serious alarm: hear of it
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

from lightning.bounded import Once
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
"""The number of this file's contract. A minor release raises it when a stage that was written for it would not do any more what
it did, and the change log says what to change in a stage."""
OF_STAGES: Final = ("alerts",)
"""Settings of the trainer that stages of plugins carry out."""
NOT_NAMES: Final = ("dropped", "eval", "pipeline", "policy_fault", "reward", "seconds", "skipped")
"""What metrics of the trainer's own begin with: no stage that adds metrics is called so."""


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
        """Its content, ready for `json.dumps`."""
        return {
            "cause": self.cause,
            "text": self.text,
            "serious": self.serious,
            "steps": list(self.steps),
            "rollouts": list(self.rollouts),
        }


@dataclass(frozen=True, slots=True)
class StepTaken:
    """A step that the engine has taken. `rollouts` are all that were sampled for it, failed ones included, `groups` what the
    `batch` was made of, and `metrics` its numbers so far. `parts` are those of the run's gateway, whose `line` has the plugin's
    own stage of calls (`Line.named`); None where a stage is tried without a run. A stage reads these and changes none."""

    step: int
    rollouts: Sequence[Rollout]
    groups: Sequence[Group]
    batch: Batch
    metrics: Mapping[str, float]
    train_agents: Sequence[str] = ()
    parts: Parts | None = None


@dataclass(frozen=True, slots=True)
class Added:
    """What a stage adds to a step. A metric `share` of the stage `mine` is recorded as `mine/share`; `context` is any JSON, and
    stands in the step's context under the stage's name."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    context: Json = None
    alarms: Sequence[Alarm] = ()


class DryRun(Protocol):
    """What a dry run has found, in words, with the cure."""

    @property
    def problems(self) -> Sequence[str]:
        """What keeps training from starting."""

    @property
    def hints(self) -> Sequence[str]:
        """What is worth a look."""

    @property
    def ok(self) -> bool:
        """Whether training can start."""


Rehearse: TypeAlias = (
    "Callable[[Stack, Sequence[Task], Sequence[str], Algorithm | SearchAlgorithm, Reporter], Awaitable[DryRun]]"
)
"""See `StepStage.rehearsed`."""


class StepStage(Stage):
    """A plugin's place at the steps of a run. One is made for each run; it overrides the methods of the points where it
    stands. The awaited ones are called on the event loop that also answers the agents' requests: leave what takes long to a
    thread."""

    async def begun(self, steps: Sequence[Mapping[str, float]], evaluations: Sequence[Evaluation]) -> Iterable[Alarm]:
        """The run begins, or goes on after these steps and evaluations. Returns the alarms that they give: those were said
        then, and are not said again."""
        return ()

    async def taken(self, step: StepTaken) -> Added | None:
        """The engine has taken a step, and it is about to be committed. None adds nothing."""

    async def evaluated(self, evaluations: Sequence[Evaluation]) -> Iterable[Alarm]:
        """Held-out tasks were run: all evaluations so far that can be compared, the new one last."""
        return ()

    def alarmed(self, alarm: Mapping[str, Json]) -> None:
        """A stage gave a serious alarm: `Alarm.to_json` with `run` and `step`. Return at once."""

    async def ended(self) -> None:
        """The run ends, however it does."""

    async def rehearsed(
        self,
        stack: Stack,
        tasks: Sequence[Task],
        train_agents: Sequence[str],
        algorithm: Algorithm | SearchAlgorithm,
        reporter: Reporter,
    ) -> DryRun:
        """Run the tasks without training, and show what was found. One stage may stand here."""
        raise NotImplementedError


CONTRACT: Final = Contract(
    kind=StepStage,
    asked="step_stages",
    api=API,
    points=("begun", "taken", "evaluated", "alarmed", "ended", "rehearsed"),
    ordered=("taken",),
    setting="trainer.stage_order",
    settings=OF_STAGES,
    of_stages=OF_STAGES,
    error=PluginError,
    of="steps",
    where="trainer",
    passes=(StoreError,),
    cure="Mend the plugin and resume the run, or resume it without the stage",
    alone=(("rehearsed", "make dry runs"),),
)


class StepLine(StageLine[StepStage]):
    """The stages of a run (`trainer.stage_order`); use it with `async with`, which tells them of the end. Raises `PluginError`,
    as a `StageLine` does, and for a stage that is named as the trainer's own metrics are."""

    contract = CONTRACT

    def __init__(self, stages: Sequence[NamedStage[StepStage]] = (), order: Sequence[str] = ()) -> None:
        super().__init__(stages, order)
        for each in self.stages:
            if each.name in NOT_NAMES:
                raise PluginError(
                    f"the stage {each.said} has the name with which the trainer's own metrics begin ({each.name}/...): its "
                    f"author registers it under another one; until then set {each.off}"
                )
        self._said = Once()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in self.at("ended"):
            with _heard(each, "ended"):
                await each.stage.ended()

    async def begin(self, steps: Sequence[Mapping[str, float]], evaluations: Sequence[Evaluation]) -> None:
        """See `StepStage.begun`. Raises `StageError`."""
        for each in self.at("begun"):
            with CONTRACT.blaming(each, "begun", "the begin of the run"):
                self._new(each, await each.stage.begun(steps, evaluations))

    async def taken(self, step: StepTaken) -> Added:
        """See `StepStage.taken`: all that the stages add, the context by their names, and alarms that were not said before.
        Raises `StageError`."""
        metrics: dict[str, float] = {}
        context: dict[str, Json] = {}
        alarms: list[Alarm] = []
        for each in self.at("taken"):
            seen = MappingProxyType({**step.metrics, **metrics})
            with CONTRACT.blaming(each, "taken", f"step {step.step}, which is not committed"):
                added = await each.stage.taken(replace(step, metrics=seen)) or Added()
                metrics |= {f"{each.name}/{name}": _number(name, value) for name, value in added.metrics.items()}
                json.dumps(added.context, allow_nan=False)
                alarms += self._new(each, added.alarms)
            context |= {} if added.context is None else {each.name: added.context}
        return Added(metrics, context, alarms)

    async def evaluated(self, evaluations: Sequence[Evaluation]) -> list[Alarm]:
        """See `StepStage.evaluated`: alarms that were not said before. Raises `StageError`."""
        alarms: list[Alarm] = []
        for each in self.at("evaluated"):
            with CONTRACT.blaming(each, "evaluated", "an evaluation"):
                alarms += self._new(each, await each.stage.evaluated(evaluations))
        return alarms

    def alarmed(self, alarm: Mapping[str, Json]) -> None:
        """See `StepStage.alarmed`. Raises nothing."""
        for each in self.at("alarmed"):
            with _heard(each, "alarmed"):
                each.stage.alarmed(dict(alarm))

    def rehearsal(self) -> Rehearse:
        """See `StepStage.rehearsed`. Raises `ConfigError` where no stage stands there."""
        for each in self.at("rehearsed"):
            return each.stage.rehearsed
        raise ConfigError(
            f"a dry run needs a plugin that makes it, and there is none: the stages of steps here are "
            f"{', '.join(self.versions) or 'none'}.{plugins().cures('step_stages', 'rehearsed')}"
        )

    def _new(self, each: NamedStage[StepStage], alarms: Iterable[Alarm]) -> list[Alarm]:
        return [alarm for alarm in alarms if self._said.first((each.name, alarm.cause))]


def _number(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError(f"the metric {name!r} is {value!r} and no number: leave out what was not measured")
    return float(value)


@contextmanager
def _heard(each: NamedStage[StepStage], point: str) -> Iterator[None]:
    """What a stage raises in the block is logged, and training goes on."""
    try:
        yield
    except Exception:
        log.exception("the stage %s failed (%s); training goes on", each.said, point)


def step_line(config: Config) -> StepLine:
    """The stages that plugins register, one of each kind for a run with these settings. Raises what `Contract.made` raises."""
    return StepLine(CONTRACT.made(config, config.trainer), config.trainer.stage_order)
