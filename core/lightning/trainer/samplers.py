"""The samplers that supply a step's groups, the orders of tasks, and the core's own sampler, which samples when the step is
due.

The invariant: a step looks at a list of groups that can be read from the store again, each finished, each looked at by one step
only. Rollouts planned before an interruption are run to their end after it and not planned twice. A sampler or an order that
fails ends the step with its plugin's name. A setting that no sampler carries out is refused before a run begins.
"""

from __future__ import annotations

import functools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, Final, Self

from lightning.batch.trajectory import Group
from lightning.config.sections import TrainerConfig
from lightning.errors import ConfigError, PluginError, RunnerError
from lightning.plugins import plugins
from lightning.plugins.stages import Contract, NamedStage, Stage
from lightning.store.protocol import Store
from lightning.store.url import redacted
from lightning.trainer.algorithm import AlgorithmSchedule, samples_dynamically
from lightning.trainer.context import Epoch, epoch_at
from lightning.trainer.plan import TRAIN, fixed_order, generation, is_lost, place_after, tasks_of_wave, train_rollouts
from lightning.trainer.stack import Stack
from lightning.trainer.summary import Reporter, grouped
from lightning.trainer.training_data import all_rollouts, load_groups, of_groups
from lightning.types import Json, Rollout, Run, Status, Task

if TYPE_CHECKING:
    from lightning.config import Config

logger = logging.getLogger(__name__)

API: Final = 1
"""The version of the contract of samplers and orders. A minor release raises it when one written for the old version would
behave differently, and the change log says what to change."""
OF_SAMPLERS: Final = ("sampling", "max_staleness")
"""Settings of the trainer that only samplers of plugins carry out."""
RECORDED: Final = "recorded"
"""The name of the record that a run is trained on: as an argument of `Trainer`, and as a key of the run's configuration."""
MOST_REASONS = 3
"""Most reasons that a warning names."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step looked at: the groups, and all of their rollouts, failed ones included, in the same order.

    `seconds` is the time in which they were sampled; `metrics` are the sampler's own. `elsewhere` says that other policies than
    this run's sampled them.
    """

    rollouts: Sequence[Rollout]
    groups: Sequence[Group]
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict)
    elsewhere: bool = False


@dataclass(frozen=True, slots=True)
class Asked:
    """What a run asks of its sampler, before anything is opened. `recorded` names the record to train on; None for none."""

    config: Config
    schedule: AlgorithmSchedule
    agents: Sequence[str] = ()
    recorded: str | None = None


@dataclass(frozen=True, slots=True)
class Brought:
    """What a sampler of a record provides: the record's tasks, what the run's configuration says of the record, the number of
    steps of one pass over it, and a message for the user."""

    tasks: Sequence[Task]
    described: Mapping[str, Json]
    steps: int
    said: str = ""


@dataclass(frozen=True, slots=True)
class Ground:
    """The objects that a sampler works with, once everything is open. `finished` is called with every rollout that ends for
    good."""

    stack: Stack
    schedule: AlgorithmSchedule
    tasks: Sequence[Task]
    agents: Sequence[str]
    reporter: Reporter
    finished: Callable[[Rollout], None]
    epochs: Sequence[Epoch] = ()


class TaskOrder(Stage, ABC):
    """A plugin's order of a run's tasks. Each run makes its own, from its tasks and the settings `trainer`.

    The same place, after the same committed steps, must give the same tasks, so that a resumed run plans what it planned
    before.
    """

    async def recall(self, store: Store, run: Run) -> None:
        """Read what the run's committed steps say, when the run begins or resumes."""

    async def learn(self, store: Store, step: int, rollouts: Sequence[Rollout]) -> None:
        """Learn from a committed step that looked at these rollouts; branches are not among them."""

    @abstractmethod
    def ranked(self, place: str, group_size: int, *, without: Collection[str] = ()) -> list[Task]:
        """Return the tasks, those to sample first at the beginning. `place` says what they are for; tasks with an id of
        `without` are being sampled already, and come last."""

    def of_step(self, step: int, group_size: int, first: int, count: int) -> list[Task]:
        """Return `count` tasks of a step from place `first` on, each once before one comes again. Further waves are further
        places."""
        ranked = self.ranked(f"step {step}", group_size)
        return [ranked[place % len(ranked)] for place in range(first, first + count)]


class Sampler(Stage, ABC):
    """Supplies a run's groups. Each run makes its own, from what it asks for; nothing is opened until `start`.

    `carries_out` names the settings of the trainer that it carries out: those of `OF_SAMPLERS`, `order` if it takes orders of
    plugins, and `recorded`. After `begin` it has all that is in `Ground`, the settings as `config`, and `order`. A
    `LightningError` that it raises ends the run as it is; any other exception is a failure of the plugin.
    """

    carries_out: ClassVar[Collection[str]] = ()
    named: NamedStage[Sampler] | None = None
    """This sampler with its registered name and plugin; None for the core's own."""
    order: NamedStage[TaskOrder] | None = None
    """The order of a plugin that the run asks for; None for an order of the core's."""
    stack: Stack
    schedule: AlgorithmSchedule
    tasks: Sequence[Task]
    agents: Sequence[str]
    reporter: Reporter
    finished: Callable[[Rollout], None]
    epochs: Sequence[Epoch]
    config: TrainerConfig

    # where a plugin stands --------------------------------------------------------------------------------------
    async def record(self, resources: AsyncExitStack, known: Json, out: Path, project: str) -> Brought:
        """Open the record that the run in `out` is trained on; `resources` closes it. `known` is what the run's configuration
        says of the record, None at the run's first start."""
        raise NotImplementedError

    async def start(self) -> None:
        """Start background work, after the policy server has the weights of the last committed step."""

    async def close(self) -> None:
        """End background work."""

    @abstractmethod
    async def step(self, step: int) -> Sampled:
        """Return the groups of a step. Raises `RunnerError` when every one of its rollouts failed."""

    @abstractmethod
    async def finish(self, rollouts: list[Rollout]) -> None:
        """Create rollouts (again, harmlessly, after a resume), and return when every one of them has ended."""

    async def served(self, version: int) -> None:
        """The policy server has the weights of `version`: so many steps are committed."""

    # what the loop asks -----------------------------------------------------------------------------------------
    def begin(self, ground: Ground) -> Self:
        """Take the objects to work with, once everything is open."""
        self.stack, self.schedule, self.tasks, self.agents = ground.stack, ground.schedule, ground.tasks, ground.agents
        self.reporter, self.finished = ground.reporter, ground.finished
        self.epochs = ground.epochs or [Epoch(0, 1, self.stack.run.config)]
        self.config = self.stack.config.trainer
        self.order = _order_of(self.config, self.tasks)
        return self

    async def __aenter__(self) -> Self:
        if self.order is not None:
            with ORDER.blaming(self.order, "recall"):
                await self.order.stage.recall(self.stack.store, self.stack.run)
        with self._blamed("start"):
            await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._blamed("close"):
            await self.close()

    @property
    def versions(self) -> Mapping[str, str]:
        """The sampler and the order, if plugins bring them, with the versions of their distributions."""
        found = {} if self.named is None else {self.named.name: self.named.version}
        return found | ({} if self.order is None else {f"order {self.order.name}": self.order.version})

    def _blamed(self, point: str) -> AbstractContextManager[None]:
        """Turn an exception of a plugin's sampler in the block into an error with the plugin's name, which ends the step."""
        return nullcontext() if self.named is None else SAMPLER.blaming(self.named, point)

    async def opened(self, resources: AsyncExitStack, known: Json, out: Path, project: str) -> Brought:
        """Call `record`, with the plugin's name in its errors."""
        with self._blamed("record"):
            return await self.record(resources, known, out, project)

    async def sample(self, step: int) -> Sampled:
        """Call `step`, with the plugin's name in its errors. Raises the plugin's failure if that returns no `Sampled`."""
        with self._blamed(f"step {step}"):
            if not isinstance(found := await self.step(step), Sampled):
                raise TypeError(f"it returned {found!r:.80} and no Sampled")
            return found

    async def committed(self, version: int, rollouts: Sequence[Rollout]) -> None:
        """Tell the order of the last committed step, which looked at these rollouts, and call `served`."""
        if self.order is not None:
            begun = [
                rollout for rollout in rollouts if rollout.parent is None
            ]  # branches begin in states that were chosen
            with ORDER.blaming(self.order, "learn"):
                await self.order.stage.learn(self.stack.store, version, begun)
        with self._blamed("served"):
            await self.served(version)

    async def execute(self, plan: Callable[[int], list[Rollout]], what: str) -> list[Rollout]:
        """Run a planned evaluation to its end. Raises `RunnerError` when it is lost as a whole.

        `plan(n)` plans the n-th try of the evaluation. After a resume, a try that was lost as a whole is followed by another.
        """
        first = plan(0)
        known = await all_rollouts(self.stack.store, first[0].run, split=first[0].split, step=first[0].step)
        rollouts = await self.ended(plan(generation(known, first)), what)
        self.check(what, rollouts)
        return rollouts

    # what a sampler may use -------------------------------------------------------------------------------------
    def ordered(self, ask: Callable[[TaskOrder], Sequence[Task]]) -> list[Task]:
        """Return the tasks in the order of a plugin. Raises the plugin's failure if it returns anything but tasks of the
        run."""
        assert self.order is not None, "the run has an order of the core's"
        with ORDER.blaming(self.order, "ranked"):
            found = list(ask(self.order.stage))
            known = {task.id for task in self.tasks}
            if not found or not all(isinstance(task, Task) and task.id in known for task in found):
                raise TypeError("it returned no tasks, or others than the run's")
        return found

    async def ended(self, planned: list[Rollout], what: str) -> list[Rollout]:
        """Run planned rollouts of one step and split to their end, and return all rollouts of their groups."""
        self.reporter.phase(what, len(planned))
        with self._blamed(what):
            await self.finish(planned)
        one = planned[0]
        known = await all_rollouts(self.stack.store, one.run, split=one.split, step=one.step)
        return of_groups(known, [rollout.group for rollout in planned])

    async def groups_of(self, rollouts: Sequence[Rollout]) -> list[Group]:
        """Return the groups of ended rollouts."""
        return await load_groups(self.stack.store, rollouts, self.agents, self.config.policy_fault)

    def check(self, what: str, rollouts: Sequence[Rollout]) -> None:
        """Warn how many rollouts failed. Raises `RunnerError` when that, with the cancelled ones, leaves nothing to learn
        from."""
        said = self.tell_failed(what, rollouts)
        if rollouts and is_lost(rollouts):
            cancelled = sum(rollout.status is Status.CANCELLED for rollout in rollouts)
            if not said:
                raise RunnerError(f"{what}: all {cancelled} were cancelled, there is nothing to learn from")
            rest = f"; {cancelled} more were cancelled" if cancelled else ""
            raise RunnerError(
                f"{what}: all {len(rollouts) - cancelled} failed, there is nothing to learn from: {said}{rest} "
                f"(whole tracebacks: lightning runs show {self.stack.run.id} --failed --json)"
            )

    def tell_failed(self, what: str, rollouts: Sequence[Rollout]) -> str:
        """Warn of the failed rollouts, and return why they failed; "" if none has."""
        failed = [rollout for rollout in rollouts if rollout.status is Status.FAILED]
        if not failed:
            return ""
        reasons = [f"{count} x {why}" for count, why in grouped(rollout.error for rollout in failed)]
        said = "; ".join(reasons[:MOST_REASONS]) + ("; ..." if len(reasons) > MOST_REASONS else "")
        logger.warning("%s: %d of %d failed: %s", what, len(failed), len(rollouts), said)
        return said


class TurnSampler(Sampler):
    """Samples and trains in turns: every token of a step comes from the weights that the step starts with.

    With dynamic sampling a step samples in waves until `tasks_per_step` of its groups teach something, or for
    `trainer.max_waves` waves; it trains on all groups that teach.
    """

    carries_out: ClassVar[Collection[str]] = ("order",)

    async def finish(self, rollouts: list[Rollout]) -> None:
        """Run the rollouts to their end."""
        await self.stack.execute(rollouts, self.finished)

    def begun(self, group_size: int) -> int:
        """Return how many rollouts of a group begin at its task; a subclass may add the others in `grow`."""
        return group_size

    def beginnings(self, planned: list[Rollout]) -> list[Rollout]:
        """Return the planned rollouts of a wave as they are to begin: here all at their task. A subclass may make them branches
        of ended rollouts. It must return the same after the same committed steps."""
        return planned

    async def grow(self, ended: list[Rollout], group_size: int, what: str) -> list[Rollout]:
        """Add rollouts to groups that have ended, and return all rollouts of the groups. This sampler adds none."""
        return ended

    async def step(self, step: int) -> Sampled:
        """Sample the groups of a step, in waves with dynamic sampling. Raises `RunnerError` when every rollout failed."""
        began, algorithm = time.monotonic(), self.schedule.at(step)
        count, what = self.config.tasks_per_step, f"training rollouts of step {step}"
        waves = self.config.max_waves if samples_dynamically(algorithm) else 1
        plan = functools.partial(self._planned, step, algorithm.group_size)
        known = await all_rollouts(self.stack.store, self.stack.run.id, split=TRAIN, step=step)
        later = [rollout for wave in range(1, waves) for rollout in plan(wave, 0)] if known else []
        number = generation(known, plan(0, 0), later)
        rollouts: list[Rollout] = []
        groups: list[Group] = []
        teaching, wave = 0, 0
        while teaching < count and wave < waves:
            named = f"{what}, wave {wave + 1}" if wave else what
            ended = await self.ended(plan(wave, number), named)
            ended = await self.grow(ended, algorithm.group_size, named)
            rollouts += ended
            self.check(what, rollouts)
            groups += await self.groups_of(ended)
            if samples_dynamically(algorithm):
                teaching += sum(algorithm.teaches(group) for group in groups[-count:])
            wave += 1
        metrics = {"waves": float(wave), "groups_teaching": float(teaching)} if samples_dynamically(algorithm) else {}
        return Sampled(rollouts, groups, time.monotonic() - began, metrics)

    def _planned(self, step: int, size: int, wave: int, number: int) -> list[Rollout]:
        """Return the rollouts of one wave of a step, in the `number`-th try of the step."""
        config, attempts = self.config, self.stack.config.runner.max_attempts
        count, first = config.tasks_per_step, wave * config.tasks_per_step
        if (order := fixed_order(config.order)) is None:
            tasks = self.ordered(lambda chosen: chosen.of_step(step, size, first, count))
        else:
            now = epoch_at(self.epochs, step)
            until = self.epochs[: now.number + 1]
            taken = [(after.first - before.first) * _per_step(before, count) for before, after in pairwise(until)]
            begin = place_after(until, taken, self.tasks)
            tasks = tasks_of_wave(self.tasks, step - now.first, wave, count, config.seed, order, begin)
        begun = self.begun(size)
        planned = train_rollouts(self.stack.run.id, step, tasks, begun, attempts, generation=number, first=first)
        return self.beginnings(planned)


def _per_step(epoch: Epoch, otherwise: int) -> int:
    """Return how many tasks a step of a config epoch takes; `otherwise` if the epoch does not say."""
    found = epoch.setting("trainer", "tasks_per_step")
    return found if isinstance(found, int) else otherwise


# which sampler and which order ----------------------------------------------------------------------------------
SAMPLER: Final = Contract(
    kind=Sampler,
    asked="samplers",
    api=API,
    points=("record", "start", "close", "step", "finish", "served"),
    ordered=(),
    setting="",
    error=ConfigError,
    of="groups",
    where="trainer",
    called="samplers",
    names={"carries_out": ("settings", (*OF_SAMPLERS, "order", RECORDED))},
)
ORDER: Final = Contract(
    kind=TaskOrder,
    asked="orders",
    api=API,
    points=("recall", "learn", "ranked"),
    ordered=(),
    setting="",
    error=ConfigError,
    of="groups",
    where="trainer",
)


def sampler_of(asked: Asked) -> Sampler:
    """Return the sampler that a run asks for: a plugin's, or the core's own. Nothing is opened. Raises `ConfigError` if two
    samplers claim the run, for a setting that the sampler does not carry out, and for an unknown order."""
    named: list[NamedStage[Sampler]] = SAMPLER.made(asked)
    for each in named:
        each.stage.named = each
    if len(named) > 1:
        both = " and ".join(f"{each.said} ({', '.join(each.stage.carries_out)})" for each in named)
        raise ConfigError(f"a run has one sampler, and its settings ask for {both}: leave out those of all but one")
    sampler = named[0].stage if named else TurnSampler()
    config, plain = asked.config.trainer, TrainerConfig()
    wanted = {f"trainer.{name}": (name, getattr(config, name), getattr(plain, name)) for name in OF_SAMPLERS}
    wanted["recorded (--recorded)"] = RECORDED, asked.recorded and redacted(asked.recorded), None
    for said, (name, value, off) in wanted.items():
        if value != off and name not in sampler.carries_out:
            brings = str(value) if name == "sampling" else name
            known = plugins().names(SAMPLER.asked)
            raise ConfigError(SAMPLER.not_carried_out(f"{said} is {value!r}", brings, known, "leave the setting out"))
    if fixed_order(config.order) is None:
        _check_order(config.order)
        if "order" not in sampler.carries_out:
            raise ConfigError(
                f"trainer.order is {config.order!r}, and the sampler {named[0].said} takes no order of a plugin: set it to "
                "'shuffled' or 'given'"
            )
    return sampler


def _check_order(name: str) -> None:
    """Raise `ConfigError` for an order that no plugin registers."""
    try:
        plugins().get(ORDER.asked, name)
    except PluginError as error:
        raise ConfigError(f"trainer.order = {name!r} is neither 'shuffled' nor 'given', and {error}") from error


def _order_of(config: TrainerConfig, tasks: Sequence[Task]) -> NamedStage[TaskOrder] | None:
    """Make the order of a plugin that the settings ask for; None for an order of the core's."""
    if fixed_order(config.order) is not None:
        return None
    _check_order(config.order)
    if (order := ORDER.make(config.order, tasks, config)) is None:
        raise ConfigError(
            f"the plugin {plugins().owner(ORDER.asked, config.order)} registers the order {config.order!r}, and its factory "
            "returned None instead of a TaskOrder: mend the plugin, or set trainer.order to 'shuffled' or 'given'"
        )
    return order
