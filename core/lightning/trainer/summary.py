"""Tells people about a run: its progress while it goes on, why attempts failed, its results, and which held-out evaluation was
the best.

The invariant: a summary is read from the store alone, so that it can be made of any run at any time. The best evaluation
follows from the run's evaluations and from the files on disk, so that a resumed run keeps the same model and ends after the
same step.
"""

from __future__ import annotations

import logging
import math
import re
import shutil
import sysconfig
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Task as Bar

import lightning
from lightning.config import Config
from lightning.errors import ConfigError
from lightning.runner.outcomes import CAUSES, read_cause
from lightning.safe_text import counted
from lightning.store.pages import each_rollout
from lightning.store.protocol import Store
from lightning.terminal import Terminal
from lightning.trainer.context import Epoch
from lightning.trainer.plan import TRAIN, VAL, newest_generation
from lightning.types import Json, Rollout, Status, StepReward

logger = logging.getLogger(__name__)


PULSE_SECONDS: Final = 10.0
"""The longest time without a line where there are no live bars, as in a pipe or a file."""


class Reporter:
    """Shows live bars on a terminal, and one line per step anywhere. Where there are no bars, a line says how far the present
    phase is whenever nothing was shown for `PULSE_SECONDS`. With `enabled=False` it shows nothing. `clock` is in seconds."""

    def __init__(
        self,
        *,
        enabled: bool = True,
        console: Terminal | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console or Terminal(stderr=True, quiet=not enabled)
        live = self.console.is_terminal or self.console.is_jupyter
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            disable=not (enabled and live),
            get_time=clock,
        )
        self._clock, self._shown_at = clock, clock()
        self._over = threading.Event()
        self._pulses: threading.Thread | None = None
        if enabled and not live:
            self._pulses = threading.Thread(target=self._keep_pulsing, name="lightning-progress", daemon=True)
        self._steps: TaskID | None = None
        self._now = self._bars.add_task("starting", total=None, note="")
        self._failed = 0
        self._seconds: list[float] = []
        self._total = 0

    def __enter__(self) -> Self:
        self._bars.start()
        if self._pulses is not None:
            self._pulses.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._pulses is not None:
            self._pulses.join()
        self._bars.stop()

    def _keep_pulsing(self) -> None:
        while not self._over.wait(self.pulse()):
            pass

    def pulse(self) -> float:
        """Show how far the present phase is, if nothing was shown for `PULSE_SECONDS`; return the seconds until it is due
        again."""
        left = self._shown_at + PULSE_SECONDS - self._clock()
        if left > 0:
            return left
        now = self._present()
        done = "" if now.total is None else f": {now.completed:.0f} of {counted(round(now.total), 'rollout')}"
        failed = f", {self._failed} failed" if self._failed else ""
        self.say(f"{now.description}{done}{failed}, for {_clock(now.elapsed or 0.0)} so far")
        return PULSE_SECONDS

    def begin(self, first: int, total: int) -> None:
        """Begin the bar of steps: `first` of `total` steps have been taken."""
        self._total = total
        self._steps = self._bars.add_task("steps", total=total, completed=first, note="")

    def phase(self, what: str, rollouts: int | None = None) -> None:
        """Show the present phase; `rollouts` is how many rollouts this phase waits for."""
        self._failed = 0
        self._bars.reset(self._now, description=what, note="")
        self._present().total = rollouts  # `reset` keeps the total of the phase before in the place of None

    def _present(self) -> Bar:
        return next(task for task in self._bars.tasks if task.id == self._now)

    def rollout(self, rollout: Rollout) -> None:
        """Count a rollout that has ended."""
        self._failed += rollout.status is Status.FAILED
        note = f"[red]{self._failed} failed" if self._failed else ""
        self._bars.update(self._now, advance=1, note=note)

    def step(self, step: int, metrics: Mapping[str, float], seconds: float) -> None:
        """Show a line for a step that has been committed; `seconds` is its wall time."""
        self._seconds = [*self._seconds, seconds][-10:]
        left = (self._total - step) * sum(self._seconds) / len(self._seconds)
        line = (
            f"step {step:>4}/{self._total}  reward {said(metrics.get('reward'))}{_with_failures(metrics)}  "
            f"{_named_parts(metrics)}"
            f"training rollouts {metrics['rollouts']:.0f} ({metrics['failed']:.0f} failed{_causes(metrics)})  "
            f"mixed groups {metrics['groups_used']:.0f}/{metrics['groups']:.0f}  "
            f"{metrics['tokens_per_second']:.0f} tok/s  gap {said(metrics.get('max_logprob_gap'), '.1e')}  "
            f"{_pipeline(metrics)}{seconds:.1f} s, {_clock(left)} left"
        )
        self.say(line)
        if self._steps is not None:
            self._bars.update(self._steps, completed=step, note=f"{_clock(left)} left")

    def evaluated(self, result: Evaluation) -> None:
        """Show a held-out evaluation that has ended."""
        failed = f", [red]{result.failed} failed[/red]" if result.failed else ""
        reward = said_reward(result)
        reward += "".join(f", {escape(name)} {value:.3f}" for name, value in result.rewards.items())
        self._shown_at = self._clock()
        self.console.print(
            f"[bold]held-out after {counted(result.step, 'step')}: reward {reward}[/bold] over "
            f"{counted(result.rollouts, 'task')}{failed}",
            highlight=False,
            soft_wrap=True,
        )

    def say(self, text: str) -> None:
        """Show a line of plain text."""
        self._shown_at = self._clock()
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def said(value: float | None, form: str = ".3f") -> str:
    """Format a number for people; `-` for None."""
    return "-" if value is None else format(value, form)


def _named_parts(metrics: Mapping[str, float]) -> str:
    """Format the named parts of the reward."""
    return "".join(f"{name.removeprefix(NAMED)} {metrics[name]:.3f}  " for name in metrics if name.startswith(NAMED))


def said_reward(result: Evaluation) -> str:
    """Format the reward of an evaluation; if rollouts failed, also the reward in which failed rollouts count as 0."""
    reward = said(result.reward)
    if not result.failed:
        return reward
    return f"{reward} ({said(result.reward_with_failures)} if failures count as 0)"


def said_parts(rewards: Mapping[str, float], given: Sequence[StepReward] = ()) -> str:
    """Format the named parts of a rollout's reward, then, by name, how many rewards its calls were `given` and their sum."""
    said = [f"{name} {value:.3g}" for name, value in rewards.items()]
    for name in dict.fromkeys(reward.name for reward in given):
        values = [reward.value for reward in given if reward.name == name]
        said.append(f"{name} {sum(values):.3g} of {counted(len(values), 'call')}")
    return ", ".join(said)


def _with_failures(metrics: Mapping[str, float]) -> str:
    """Format the reward in which failed rollouts count as 0; empty if no rollout failed. The reward beside it is the mean of
    the rollouts that succeeded."""
    return f" ({said(metrics.get('reward_with_failures'))} if failures count as 0)" if metrics["failed"] else ""


def _causes(metrics: Mapping[str, float]) -> str:
    """Format how many rollouts failed by the policy's fault, by cause."""
    found = {name.removeprefix(POLICY_FAULT): count for name, count in metrics.items() if name.startswith(POLICY_FAULT)}
    said = ", ".join(f"{cause} {count:.0f}" for cause, count in sorted(found.items()))
    return f", by the policy: {said}" if said else ""


def _pipeline(metrics: Mapping[str, float]) -> str:
    """Format the numbers of a sampler that goes on while the engine trains: age of the tokens, groups carried over, time
    waited; empty for any other sampler."""
    if "pipeline/groups_carried" not in metrics:
        return ""
    return (
        f"stale {said(metrics.get('staleness_mean'), '.1f')} (max {said(metrics.get('staleness_max'), '.0f')})  "
        f"carried {metrics['pipeline/groups_carried']:.0f}  waited {metrics['seconds/rollout']:.1f} s  "
    )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


PHASES = ("start", "rollout", "train", "update", "checkpoint", "eval")
"""The phases of a step's wall time; their metrics are named `seconds/<phase>`."""
NAMED = "reward/"
"""The beginning of metrics of the named parts of the reward."""
POLICY_FAULT = "policy_fault/"
"""The beginning of metrics that count rollouts failed by the model's own fault; the cause follows."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Held-out result with the policy after `step` optimizer steps, or with a version of a prompt after `step` rounds.

    `reward` is the mean over scored rollouts (the success rate where rewards are 0 or 1), None if no rollout was scored.
    `failed` rollouts have no reward and are left out of this mean. `rewards` are the means of the named parts, each over the
    rollouts that have the part, `counts` how many these are, and `deviations` their standard deviations. `deviation` is the
    standard deviation of the scored rollouts' rewards, `lowest` the lowest of them.
    """

    step: int
    reward: float | None
    rollouts: int
    failed: int
    rewards: dict[str, float] = field(default_factory=dict)
    deviation: float = 0.0
    lowest: float = 0.0
    deviations: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def known(self) -> bool:
        """Whether the evaluation has information: some of its rollouts were scored or failed."""
        return bool(self.rollouts) and (self.reward is not None or self.failed > 0)

    @property
    def score(self) -> float:
        """The mean by which `known` evaluations are compared: a failed rollout counts as 0, or as the lowest reward if the
        lowest reward is below 0."""
        return (self.reward_with_failures or 0.0) + min(0.0, self.lowest) * self.failed / max(self.rollouts, 1)

    @property
    def error(self) -> float:
        """The standard error of `score`. Rewards that are all equal do not show how much other rewards would vary, so the
        deviation is taken as at least a tenth of `score`."""
        share, given = self.failed / max(self.rollouts, 1), self.reward or 0.0
        apart = share * (1.0 - share) * (given - min(0.0, self.lowest)) ** 2
        deviation = math.sqrt((1.0 - share) * self.deviation**2 + apart)
        return max(deviation, 0.1 * abs(self.score)) / math.sqrt(max(self.rollouts - 1, 1))

    @property
    def reward_with_failures(self) -> float | None:
        """The mean over all rollouts, with 0 for failed ones; None if nothing is `known`."""
        return self.mean_with_failures("reward")

    def mean_with_failures(self, measure: str) -> float | None:
        """Return the `mean` over all rollouts, with 0 for failed ones; None where no rollout has the measure and none
        failed."""
        mean = self.mean(measure)
        if mean is None and not self.failed:
            return None
        having = self.having(measure)
        return (mean or 0.0) * having / (having + self.failed)

    def having(self, measure: str) -> int:
        """Return how many rollouts have a named part of the reward; for `reward`, how many did not fail."""
        if self.mean(measure) is None:
            return 0
        return self.counts.get(measure, self.rollouts - self.failed)

    def mean(self, measure: str) -> float | None:
        """Return the mean of a named part of the reward, or of `reward` itself; None where no rollout has it."""
        return self.reward if measure == "reward" else self.rewards.get(measure)


@dataclass(frozen=True, slots=True)
class Summary:
    """A run in numbers; a number that was not measured is None.

    `idle_steps` counts the steps that trained nothing and left the weights as they were. `rollouts` and `failed` count training
    rollouts. `rewards[i]` is the mean training reward of step i + 1; `time` has wall
    seconds by phase. `evaluations` are in the order in which they were begun; `before` is the reward of the first evaluation,
    and `after` is the reward of the last one if there are several. In `rewards_with_failures[i]` the rollouts of step i + 1
    that failed count as 0. `named_rewards[name][i]` is the mean of a named part of the reward in step i + 1, where the agent
    returned parts.

    `max_logprob_gap` is over the steps without stale tokens, because the logprobs of stale tokens also differ by what the
    policy has learned since.
    """

    run: str
    seed: int
    steps: int
    idle_steps: int
    rollouts: int
    failed: int
    trained_tokens: int
    drift_tokens: int
    max_logprob_gap: float | None
    max_probe_gap: float | None
    before: float | None
    after: float | None
    evaluations: tuple[Evaluation, ...]
    rewards: tuple[float | None, ...]
    rewards_with_failures: tuple[float | None, ...]
    named_rewards: dict[str, tuple[float | None, ...]]
    time: dict[str, float]

    @property
    def held_out_rollouts(self) -> int:
        """The number of rollouts of the evaluations; `rollouts` has the training rollouts alone."""
        return sum(result.rollouts for result in self.evaluations)

    @property
    def final_reward(self) -> float | None:
        """The held-out reward of the last step's policy; None if held-out tasks were not run after the last step, as where a
        budget ended the run."""
        ended = [result for result in self.evaluations if result.step == self.steps]
        return ended[-1].reward if ended else None

    def to_json(self) -> dict[str, Json]:
        """Return the report's content, ready for `json.dumps`."""
        evaluations = [
            {**asdict(result), "reward_with_failures": result.reward_with_failures} for result in self.evaluations
        ]
        return {**asdict(self), "held_out_rollouts": self.held_out_rollouts, "evaluations": evaluations}


def evaluate_rollouts(step: int, rollouts: Sequence[Rollout]) -> Evaluation:
    """Make the evaluation of some held-out rollouts."""
    tally = _Tally()
    for rollout in rollouts:
        tally.add(rollout)
    return tally.evaluation(step)


def is_idle(metrics: Mapping[str, float]) -> bool:
    """Return whether a step with these metrics had nothing to train on, and so left the weights as they were."""
    return metrics.get("stepped") == 0 and not metrics.get("skipped_nonfinite")


async def summarize(store: Store, run: str) -> Summary:
    """Read a run's summary from the store. Raises `StoreError`.

    Rollouts are counted page by page, because a run of weeks has millions of rollouts, more than memory has room for.
    """
    steps = [record.metrics for record in await store.steps(run, brief=True)]
    points = await store.metrics(run)
    trained = [each for each in await store.count_rollouts(run) if each.split == TRAIN]
    evaluated = await evaluations(store, run)
    time = dict.fromkeys(PHASES, 0.0)
    for point in points:
        for phase in PHASES:
            time[phase] += point.values.get(f"seconds/{phase}", 0.0)
    stored = await store.get_run(run)
    seed = stored.config.get("seed", 0) if stored else 0
    return Summary(
        run=run,
        seed=seed if isinstance(seed, int) else 0,
        steps=len(steps),
        idle_steps=sum(map(is_idle, steps)),
        rollouts=sum(each.rollouts for each in trained),
        failed=sum(each.rollouts for each in trained if each.status is Status.FAILED),
        trained_tokens=int(sum(metrics.get("tokens", 0.0) for metrics in steps)),
        drift_tokens=int(sum(metrics.get("drift_tokens", 0.0) for metrics in steps)),
        max_logprob_gap=_largest("max_logprob_gap", (step for step in steps if not step.get("staleness_max"))),
        max_probe_gap=_largest("probe_gap", (point.values for point in points)),
        before=evaluated[0].reward if evaluated else None,
        after=evaluated[-1].reward if len(evaluated) > 1 else None,
        evaluations=evaluated,
        rewards=tuple(metrics.get("reward") for metrics in steps),
        rewards_with_failures=tuple(metrics.get("reward_with_failures", metrics.get("reward")) for metrics in steps),
        named_rewards=_named(steps),
        time={phase: round(seconds, 3) for phase, seconds in time.items()},
    )


def _largest(name: str, among: Iterable[Mapping[str, float]]) -> float | None:
    return max((metrics[name] for metrics in among if name in metrics), default=None)


def _named(steps: Sequence[Mapping[str, float]]) -> dict[str, tuple[float | None, ...]]:
    names = sorted({name for metrics in steps for name in metrics if name.startswith(NAMED)})
    return {name.removeprefix(NAMED): tuple(metrics.get(name) for metrics in steps) for name in names}


def mean_parts(rollouts: Iterable[Rollout]) -> dict[str, float]:
    """Return the mean of each named part of the reward, over the rollouts that have it."""
    tally = _Tally()
    for rollout in rollouts:
        tally.add(rollout)
    return tally.means()


@dataclass(slots=True)
class _Tally:
    """The numbers that an evaluation needs of its rollouts."""

    rollouts: int = 0
    failed: int = 0
    unfinished: int = 0
    generation: int = 0
    rewards: array[float] = field(default_factory=lambda: array("d"))
    parts: dict[str, array[float]] = field(default_factory=dict)
    """The values of each named part."""

    def add(self, rollout: Rollout) -> None:
        """Count a rollout. A cancelled one is no part of the evaluation."""
        if rollout.status is Status.CANCELLED:
            return
        self.rollouts += 1
        self.failed += rollout.status is Status.FAILED
        self.unfinished += not rollout.status.ended
        if rollout.reward is not None:
            self.rewards.append(rollout.reward)
        for name, value in rollout.rewards.items():
            self.parts.setdefault(name, array("d")).append(value)

    def means(self) -> dict[str, float]:
        """Return the means of the named parts. A part called `reward` is left out, since it is the reward itself."""
        return {name: sum(values) / len(values) for name, values in sorted(self.parts.items()) if name != "reward"}

    def counts(self) -> dict[str, int]:
        """Return how many rollouts have each named part."""
        return {name: len(values) for name, values in sorted(self.parts.items()) if name != "reward"}

    def evaluation(self, step: int) -> Evaluation:
        """Return the evaluation of the rollouts counted so far."""
        if not self.rewards:
            return Evaluation(step, None, self.rollouts, self.failed, self.means(), counts=self.counts())
        return Evaluation(
            step,
            sum(self.rewards) / len(self.rewards),
            self.rollouts,
            self.failed,
            self.means(),
            deviation=_deviation(self.rewards),
            lowest=min(self.rewards),
            deviations={name: _deviation(values) for name, values in self.parts.items() if name != "reward"},
            counts=self.counts(),
        )


def _deviation(values: Sequence[float]) -> float:
    """Return the standard deviation of values, of which there is at least one."""
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))


@dataclass(slots=True)
class _Evaluations:
    """A tally of the newest try of each evaluation, in the order in which the evaluations were begun.

    An evaluation is known by its step and its versions of resources, because a search that is resumed with more rounds may
    measure another version of its prompt after the same round.
    """

    evaluated: dict[tuple[int, tuple[tuple[str, int], ...]], _Tally] = field(default_factory=dict)

    def add(self, rollout: Rollout) -> None:
        """Count a held-out rollout. The rollouts of a run must come in the order of their creation."""
        of, made = (rollout.step, tuple(sorted(rollout.resources.items()))), newest_generation([rollout])
        tally = self.evaluated.get(of)
        if tally is None or made > tally.generation:
            tally = self.evaluated[of] = _Tally(generation=made)
        if made == tally.generation:
            tally.add(rollout)

    def evaluations(self) -> tuple[Evaluation, ...]:
        """Return the evaluations that have ended."""
        return tuple(tally.evaluation(step) for (step, _), tally in self.evaluated.items() if not tally.unfinished)


async def evaluations(store: Store, run: str) -> tuple[Evaluation, ...]:
    """Return the held-out evaluations of a run that have ended, in the order in which they were begun. Raises `StoreError`."""
    found = _Evaluations()
    async for rollout in each_rollout(store, run, split=VAL):
        found.add(rollout)
    return found.evaluations()


BEST = "best"
"""The subfolder of a run's folder for the model of the best evaluation so far. The model has a folder there that is named after
its step."""
_STEP = re.compile(r"step-(\d{8})")


def check_held_out(config: Config, val: object) -> None:
    """Raise `ConfigError` if settings need held-out rewards and there are no held-out tasks, or if they need evaluations
    between the first and the last step and there are none."""
    trainer = config.trainer
    asked = [
        name
        for name, wanted in (("keep = 'best'", trainer.keep == "best"), ("patience", trainer.patience > 0))
        if wanted
    ]
    if asked and not val:
        raise ConfigError(
            f"trainer.{asked[0]} looks at held-out rewards: give held-out tasks (fit(val=...), --val FILE)"
        )
    if trainer.patience and not trainer.eval_every:
        raise ConfigError(
            "trainer.patience counts evaluations: set trainer.eval_every to the number of steps between two evaluations"
        )


class HeldOut:
    """The evaluations so far, in order, that can be compared (`Evaluation.score`). `folder` is the run's folder; `since` is the
    step after which the held-out tasks or their sampling changed last (`compared_since`)."""

    def __init__(self, folder: Path, since: int = 0) -> None:
        self._folder, self.since = folder / BEST, since
        self._results: dict[int, Evaluation] = {}

    def add(self, results: Iterable[Evaluation], *, fresh: bool = False) -> None:
        """Add evaluations; an evaluation takes the place of an earlier one of the same step. Left out are evaluations without
        information (`Evaluation.known`) and those from before the change at step `since`. An evaluation of step `since` itself
        is from before the change, unless it is `fresh`."""
        least = self.since if fresh or not self.since else self.since + 1
        self._results |= {result.step: result for result in results if result.known and result.step >= least}

    @property
    def results(self) -> tuple[Evaluation, ...]:
        """All evaluations, sorted by step."""
        return tuple(self._results[step] for step in sorted(self._results))

    @property
    def best(self) -> Evaluation | None:
        """The best evaluation; None without any."""
        return max(self.results, key=_score, default=None)

    def is_over(self, patience: int) -> bool:
        """Whether the last `patience` evaluations were no better than an evaluation before them; False if `patience` is 0."""
        best = self.best
        return bool(patience) and best is not None and sum(step > best.step for step in self._results) >= patience

    @property
    def kept(self) -> Evaluation | None:
        """The evaluation whose model is on disk; None if there is none."""
        names = (_STEP.fullmatch(entry.name) for entry in self._folder.glob("step-*"))
        steps = [int(name.group(1)) for name in names if name]
        return max((self._results[step] for step in steps if step in self._results), key=_score, default=None)

    def keep(self, result: Evaluation, export: Callable[[Path], object]) -> None:
        """Write the engine's model, which `result` evaluates, if it is better than the model on disk, and remove the other
        model. Raises `EngineError`."""
        kept = self.kept
        if kept is not None and (kept.step == result.step or _score(result) <= _score(kept)):
            return
        if (best := self.best) is not None and _score(best) > _score(result):
            logger.warning(
                "held-out tasks were solved better after %s (%.3f) than now (%.3f), but that model was not kept, because "
                "trainer.keep was not 'best' yet. To get it, start a new run with --from %s@%d",
                counted(best.step, "step"),
                _score(best),
                _score(result),
                self._folder.parent,
                best.step,
            )
        mine = self._path(result.step)
        export(mine)
        for other in self._folder.glob("step-*"):
            if other != mine:
                shutil.rmtree(other)

    def deliver(self, model: Path) -> Evaluation | None:
        """Replace the run's exported model by the kept model, wholly or not at all. Return the kept model's evaluation; None if
        no model was kept. Raises `EngineError`."""
        from lightning.engines.files import whole_folder  # safetensors: only where something is trained

        kept = self.kept
        if kept is not None:
            with whole_folder(model) as fresh:
                shutil.copytree(self._path(kept.step), fresh, dirs_exist_ok=True)
        return kept

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}"


def _score(result: Evaluation) -> float:
    return result.score


def compared_since(epochs: Sequence[Epoch]) -> int:
    """Return the first step whose evaluation was made as the newest evaluations are: on the same held-out tasks, sampled alike.
    A resume may change the tasks and their sampling."""
    first = 0
    for before, after in pairwise(epochs):
        if _measure(before) != _measure(after):
            first = after.first - 1
    return first


def _measure(epoch: Epoch) -> tuple[Json, ...]:
    tasks = epoch.config.get("tasks")
    held_out = tasks.get("val") if isinstance(tasks, Mapping) else None
    return held_out, epoch.setting("trainer", "eval_temperature"), epoch.setting("gateway", "override_sampling")


FRAME: Final = re.compile(r'^\s*File "(?P<file>.+?)", line (?P<line>\d+), in (?P<name>.+)$')
GROUP: Final = re.compile(r"^(?: +\+ (?=Exception Group)|(?: *\| ?)+)")
"""The marks before the lines of a group of exceptions."""
EXCEPTION: Final = re.compile(r"[^\W\d][\w.<>]*(?:: |$)")
"""The beginning of a line that names an exception."""
LIBRARIES: Final = tuple(
    {
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        str(Path(lightning.__file__).parent),
    }
)
"""Folders of code that is not the user's; `site-packages` of other machines as well."""
OF_PLUGINS: Final = re.compile(r"[/\\](?:adapters|plugins)[/\\][\w-]+[/\\]lightning_\w+[/\\]")
"""A folder of lightning's adapters and plugins in a checkout, where they are not in `site-packages`."""
LONGEST: Final = 300
"""The most characters of a reason's message."""
SENT: Final = "<dynamic-code>"
"""The file that cloudpickle names for code of the script that the user started: that script is sent to the worker processes."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why an attempt failed; as a text it is a line: `KeyError: 'answer' at my_agent.py:12 in solve`.

    `cause` is one of `runner.outcomes.CAUSES`, empty unless the policy is at fault. `exception` is the class as a traceback
    names it, `place` the innermost frame in the user's code; both are empty if the error is no traceback. `cure` says how to
    avoid the failure, empty if no cure is known.
    """

    cause: str = ""
    exception: str = ""
    message: str = ""
    place: str = ""
    cure: str = ""

    def __str__(self) -> str:
        said = ": ".join(part for part in (self.cause, self.exception, self.message) if part)
        return f"{said}{f' at {self.place}' if self.place else ''}{f' ({self.cure})' if self.cure else ''}"


def reason(error: str) -> Reason:
    """Return why an attempt failed, from its stored error: the last exception of a traceback, the first line of any other
    text."""
    lines = [GROUP.sub("", line) for line in error.strip().splitlines()]
    frames = [(number, found) for number, line in enumerate(lines) if (found := FRAME.match(line))]
    if not frames:
        return Reason(message=_cut(lines[0]) if lines else "no reason was given", cure=_cure(lines[0] if lines else ""))
    said = next(
        (line for line in lines[frames[-1][0] + 1 :] if line[:1].strip() and not set(line) <= set("~^ |+-")), ""
    )
    own = [found for _, found in frames if is_own(found["file"])]
    exception, _, message = said.partition(": ") if EXCEPTION.match(said) else ("", "", said)
    return Reason(
        cause=cause if (cause := read_cause(lines[0])) in CAUSES else "",
        exception=exception,
        message=_cut(message),
        place=_place(own[-1]) if own else "",
        cure=_cure(said),
    )


def _place(frame: re.Match[str]) -> str:
    file = frame["file"]
    return f"{'your script' if file == SENT else Path(file).name}:{frame['line']} in {frame['name']}"


def is_own(file: str) -> bool:
    """Whether a file of a traceback is the user's."""
    return not (file.startswith((*LIBRARIES, "<frozen")) or "site-packages" in file or OF_PLUGINS.search(file))


def grouped(errors: Iterable[str]) -> list[tuple[int, Reason]]:
    """Return the number of errors for each reason, with the reason in the words of its first error, the commonest reason first.
    Errors that differ only in numbers have the same reason."""
    found: dict[str, tuple[int, Reason]] = {}
    for error in errors:
        said = reason(error)
        kind = re.sub(r"\d+", "N", str(said))
        count, first = found.get(kind, (0, said))
        found[kind] = (count + 1, first)
    return sorted(found.values(), key=lambda each: -each[0])


def _cure(error: str) -> str:
    """Return the cure for an error in which vLLM refuses a prompt as too long: the setting that bounds the length. Return ""
    for any other error, and for an error that names the setting already."""
    if "maximum context length" not in error or "policy_server.max_model_len" in error:
        return ""
    return "here that length is policy_server.max_model_len"


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
