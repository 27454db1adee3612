"""What is wrong in a run, by the rules that look at it while it is trained, and what past runs of the same tasks did better.

The invariant: nothing is stored, and nothing runs. An alarm says at which step it could first have been known, and a comparison
of settings how many runs are behind it and whether they differed in nothing else.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import numpy as np
from lightning.config import Config, with_settings
from lightning.errors import ConfigError
from lightning.store.protocol import PRUNED, Store
from lightning.trainer.epochs import Epoch, epoch_at, read_epochs
from lightning.trainer.held_out import compared_since
from lightning.trainer.plan import TRAIN, VAL, newest_generation, of_generation
from lightning.trainer.summary import Evaluation, evaluations
from lightning.trainer.training_data import all_rollouts, load_groups
from lightning.trainer.weight_sync import bound_of
from lightning.types import Fault, Json, Rollout, Run, Status
from lightning_proof.bring_forward import policy_fault_of, train_agents_of

from lightning_debug.diagnosis import Attempted, Course, Diagnosis
from lightning_debug.rules import diagnose

LOOKS: Final = 400
"""Steps of a long run after which the rules are asked, at most."""
READ_STEPS: Final = 2
"""The last steps whose rollouts are read."""
EXAMPLES: Final = 3
"""Rollouts that an alarm names."""
LAST: Final = 5
"""Steps whose mean reward stands for a run without held-out tasks."""
FIRST: Final = (
    ("drift", "gap", "not finite", "failures", "policy faults"),
    ("collapsed", "held-out falls", "held-out stays", "second measure"),
)
"""Causes that stand before others: those that make the rest doubtful, then those by which what was learned is lost."""
NO_LEARNING: Final = (
    "trainer.seed", "trainer.project", "trainer.trackers", "trainer.alerts", "trainer.stage_order", "trainer.keep",
    "trainer.patience",
    "trainer.checkpoint_every", "trainer.keep_checkpoints", "trainer.max_logprob_gap", "engine.threads", "engine.device",
    "policy_server.", "gateway.host", "gateway.port", "gateway.limits.", "gateway.providers", "server.", "runner.preload",
    "runner.sandbox", "runner.ray.", "runner.k8s.", "runner.concurrency", "runner.lease_ttl", "runner.drain",
    "optimizer_model.",
)  # fmt: skip
"""Beginnings of settings that change how a run is done, and not what it learns."""
LEARNING: Final = ("policy_server.max_model_len", "policy_server.dtype", "policy_server.args")
"""Those that begin so and do change it."""
MEASURED: Final = ("trainer.eval_temperature", "gateway.override_sampling")
"""Settings by which rewards are measured: runs that differ in one are not compared."""
OF_COURSE: Final = (
    "trainer.max_logprob_gap", "trainer.order", "trainer.eval_every", "engine.dtype", "policy_server.dtype",
    "policy_server.attach",
)  # fmt: skip
"""Settings that the rules over a course depend on."""

Measure = Literal["held-out", "training"]
"""The tasks whose rewards a run is compared by."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """A finding with the step (from 0) after which it was first found, and whether the last step still has it. `since` is None
    for what is in rollouts: only those of the last steps are read."""

    found: Diagnosis
    since: int | None
    still: bool

    @property
    def when(self) -> str:
        """When it was found, in words."""
        if self.since is None:
            return "in the last steps" if self.still else "in the last steps, and not in the very last"
        first = f"first seen after {self.since + 1} steps"
        return first if self.still else f"{first}, and no more at the end"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended: its reward, with failed rollouts as 0, and that reward's standard error."""

    reward: float
    error: float
    measure: Measure = "held-out"


@dataclass(frozen=True, slots=True)
class Tuning:
    """A setting with which past runs fared better than with this run's value. `alone`: those runs differ in it alone."""

    setting: str
    mine: Json
    better: Json
    my_reward: float
    better_reward: float
    my_runs: int
    better_runs: int
    alone: bool


@dataclass(frozen=True, slots=True)
class Advice:
    """What `advise` found. `compared` are the runs of the same model and tasks that were measured alike, this one included;
    `unread` says why rollouts could not be looked at, empty where they were."""

    run: str
    steps: int
    alarms: tuple[Alarm, ...]
    hints: tuple[Diagnosis, ...]
    tuning: tuple[Tuning, ...]
    compared: int
    unread: str


@dataclass(frozen=True, slots=True)
class Past:
    """A run as it is compared: its settings that matter for learning, its outcome, and the settings by which that was
    measured."""

    settings: Mapping[str, Json]
    outcome: Outcome
    measured: Mapping[str, Json] = field(default_factory=dict)

    def is_alike(self, other: Past) -> bool:
        """Whether the two were measured alike."""
        return self.outcome.measure == other.outcome.measure and self.measured == other.measured


@dataclass(frozen=True, slots=True)
class Recorded:
    """What is known of a run's course. `configs` are the settings (`OF_COURSE`) of each of its `epochs`."""

    steps: Sequence[Mapping[str, float]]
    evaluations: Sequence[Evaluation]
    epochs: Sequence[Epoch]
    configs: Sequence[Config]

    def after(self, count: int) -> Course:
        """The course as it was after so many steps, at least one."""
        config = self.configs[epoch_at(self.epochs, count - 1).number]
        since = compared_since([epoch for epoch in self.epochs if epoch.first <= count])
        seen = [each for each in self.evaluations if each.step <= count and (not since or each.step > since)]
        return Course(self.steps[:count], seen, bound_of(config), config.trainer.order)


async def advise(store: Store, run_id: str, past: Sequence[Past] = ()) -> Advice:
    """Alarms of a run, the most urgent first and then in the order of their onset, and what `past` runs did better.

    Raises `ConfigError` for a run that is not there or has no step.
    """
    run = await store.get_run(run_id)
    if run is None:
        raise ConfigError(f"the store does not know the run {run_id}")
    recorded = await read_course(store, run)
    if not recorded.steps:
        raise ConfigError(f"the run {run_id} has no committed step: there is nothing to look at yet")
    found, unread = await _of_rollouts(store, run, recorded)
    alarms = [*_of_course(recorded), *found]
    alarms = [replace(each, found=await _with_examples(store, run_id, each.found)) for each in alarms]
    order = sorted(alarms, key=urgency)
    loud = tuple(alarm for alarm in order if not alarm.found.minor)
    me = await past_of(store, run, changed=True)
    alike = [other for other in past if me and me.is_alike(other)]
    return Advice(
        run_id,
        len(recorded.steps),
        loud,
        tuple(alarm.found for alarm in order if alarm.found.minor and alarm.still),
        tuple(compare(me, alike)) if me else (),
        len(alike) + 1,
        unread,
    )


def urgency(alarm: Alarm) -> tuple[bool, bool, int, float]:
    """What alarms are sorted by, the most urgent first."""
    cause = alarm.found.cause.partition("/")[0]
    place = next((place for place, causes in enumerate(FIRST) if cause in causes), len(FIRST))
    return not alarm.found.serious, not alarm.still, place, math.inf if alarm.since is None else alarm.since


async def read_course(store: Store, run: Run) -> Recorded:
    """The metrics of a run's steps, its evaluations and its settings. Raises `StoreError`."""
    steps = [record.metrics for record in await store.steps(run.id, brief=True)]
    last, epochs = await store.last_step(run.id), await read_epochs(store, run)
    dtype = last.context.get("dtype") if last else None
    return Recorded(steps, await evaluations(store, run.id), epochs, [_known(epoch, dtype) for epoch in epochs])


def _known(epoch: Epoch, dtype: Json) -> Config:
    """The settings (`OF_COURSE`) of an epoch, as far as they can be taken. `dtype` is the one that was computed in: a
    setting `auto` stands for it, but for that of a server that is attached, of which nothing is known."""
    given = {name: epoch.setting(*name.split(".")) for name in OF_COURSE}
    for name in ("engine.dtype", "policy_server.dtype"):
        if given[name] in (None, "auto") and (name == "engine.dtype" or not given["policy_server.attach"]):
            given[name] = dtype
    config = Config()
    for name, value in given.items():
        if value is not None:
            with suppress(ConfigError):  # a value that no setting takes
                config = with_settings(config, {name: value})
    return config


def _of_course(recorded: Recorded) -> Iterator[Alarm]:
    """What the rules find after any step, in the order in which it is found."""
    count = len(recorded.steps)
    looks = sorted({*range(1, count + 1, max(1, count // LOOKS)), count})
    first: dict[str, tuple[int, Diagnosis]] = {}
    now: dict[str, Diagnosis] = {}
    for steps in looks:
        now = {each.cause: each for each in diagnose(course=recorded.after(steps))}
        for cause, each in now.items():
            first.setdefault(cause, (steps - 1, each))
    for cause, (since, found) in first.items():
        yield Alarm(now.get(cause, found), since, still=cause in now)


async def _of_rollouts(store: Store, run: Run, recorded: Recorded) -> tuple[list[Alarm], str]:
    """What the rules find in the rollouts of the last steps, or why these cannot be read."""
    pruned = await store.get_state(run.id, PRUNED)
    if isinstance(pruned, Mapping) and pruned.get("trained"):
        return [], "its calls were removed (lightning db prune --trained), so that only its metrics were looked at"
    steps = len(recorded.steps)
    found: dict[str, Alarm] = {}
    for step in range(max(0, steps - READ_STEPS), steps):
        epoch = epoch_at(recorded.epochs, step)
        rollouts = await all_rollouts(store, run.id, split=TRAIN, step=step)
        agents = train_agents_of(epoch)
        groups = await load_groups(store, rollouts, agents, policy_fault_of(epoch))
        attempts = [Attempted.of(member) for group in groups for member in group.trajectories]
        errors = [rollout.error for rollout in rollouts if rollout.status is Status.FAILED]
        for each in diagnose(attempts, agents, errors):
            found[each.cause] = Alarm(replace(each, steps=(step,)), None, still=step == steps - 1)
    return list(found.values()), ""


async def _with_examples(store: Store, run: str, found: Diagnosis) -> Diagnosis:
    """The finding with some rollouts of its last step: held-out or failed ones where it is about these, and of them those that
    earned least."""
    if found.rollouts or not found.steps:
        return found
    held_out = found.cause in ("held-out falls", "held-out stays")
    rollouts = await all_rollouts(store, run, split=VAL if held_out else TRAIN, step=found.steps[-1])
    if held_out:  # those without a reward last: they say nothing of the policy
        rollouts = of_generation(rollouts, newest_generation(rollouts))
        rollouts.sort(key=lambda each: (each.reward is None, _earned(each)))
        return replace(found, rollouts=tuple(each.id for each in rollouts[:EXAMPLES]))
    if found.cause in ("failures", "policy faults"):
        mine = found.cause == "policy faults"
        rollouts = [each for each in rollouts if each.status is Status.FAILED and (each.fault is Fault.POLICY) == mine]
    return replace(found, rollouts=tuple(each.id for each in sorted(rollouts, key=_earned)[:EXAMPLES]))


def _earned(rollout: Rollout) -> float:
    return -math.inf if rollout.reward is None else rollout.reward


async def config_of(store: Store, run: Run) -> Mapping[str, Json]:
    """The configuration that a run took its last step with."""
    return (await _epochs_taken(store, run))[-1].config


async def _epochs_taken(store: Store, run: Run) -> list[Epoch]:
    last = await store.last_step(run.id)
    return [epoch for epoch in await read_epochs(store, run) if epoch.first <= (last.step if last else 0)]


async def past_of(store: Store, run: Run, *, changed: bool = False) -> Past | None:
    """A run as it is compared. None where it has not learned or measured anything, and where its settings `changed` on the
    way, unless such a run is asked for: it is then one of its last settings, and of what was measured under them."""
    epochs = await _epochs_taken(store, run)
    if len(epochs) > 1 and not changed:
        return None
    outcome = await _outcome(store, run.id, epochs[-1])
    if outcome is None:
        return None
    found = settings_of(epochs[-1].config)
    measured = {name: found.pop(name) for name in MEASURED}
    if outcome.measure == "training":  # the choice of tasks is in their rewards
        measured["trainer.order"] = found["trainer.order"]
    return Past(found, outcome, measured)


async def _outcome(store: Store, run: str, epoch: Epoch) -> Outcome | None:
    """What was measured last after a step of this epoch: the held-out reward, or that of the training tasks where they are not
    chosen by it."""
    results = [result for result in await evaluations(store, run) if result.step > epoch.first and result.known]
    if results:
        return Outcome(results[-1].score, results[-1].error, "held-out")
    steps = [record for record in await store.steps(run, brief=True) if record.step >= epoch.first][-LAST:]
    if not steps or epoch.setting("trainer", "order") == "learnable":
        return None
    given = (_as_evaluation(record.step, record.metrics) for record in steps)
    rewards = [result for result in given if result.known]
    if not rewards:
        return None
    error = math.sqrt(sum(each.error**2 for each in rewards)) / len(rewards)
    return Outcome(float(np.mean([each.score for each in rewards])), error, "training")


def _as_evaluation(step: int, metrics: Mapping[str, float]) -> Evaluation:
    """The training rewards of a step. Where their deviation was not recorded, they are as if each were 0 or 1, or as far apart
    as their mean is large."""
    reward = metrics.get("reward")
    rollouts, failed = int(metrics.get("rollouts", 0.0)), int(metrics.get("failed", 0.0))
    deviation = metrics.get("reward_std", max(abs(reward or 0.0), 1.0) / 2)
    return Evaluation(step, reward, rollouts, failed, deviation=deviation)


def is_comparable(one: Mapping[str, Json], other: Mapping[str, Json]) -> bool:
    """Whether runs of two configurations trained the same model on the same tasks, held-out ones included."""
    return all(one.get(key) == other.get(key) for key in ("model", "tasks"))


def settings_of(config: Mapping[str, Json]) -> dict[str, Json]:
    """The settings of a configuration that matter for what is learned, by their dotted names: `section.field` each, with a
    table as one value, and the arguments of the algorithm. One that the run has not is at its default."""
    recorded, found = config.get("config"), dict(_of_algorithm(config))
    found["train_agents"] = config.get("train_agents")
    for section, defaults in Config().model_dump(mode="json").items():
        given = recorded.get(section) if isinstance(recorded, Mapping) else None
        for name, value in (defaults | (dict(given) if isinstance(given, Mapping) else {})).items():
            found[f"{section}.{name}"] = value
    return {name: value for name, value in found.items() if name in LEARNING or not name.startswith(NO_LEARNING)}


def _of_algorithm(config: Mapping[str, Json]) -> Iterator[tuple[str, Json]]:
    """The algorithm's name and arguments."""
    described = config.get("algorithm")
    for key, value in described.items() if isinstance(described, Mapping) else ():
        if key == "arguments" and isinstance(value, Mapping):
            yield from ((f"algorithm.arguments.{name}", argument) for name, argument in value.items())
        else:
            yield f"algorithm.{key}", value


def compare(me: Past, past: Sequence[Past]) -> Iterator[Tuning]:
    """The settings with which past runs that were measured alike fared better than with mine, the largest difference first.

    Runs that differ from mine in one setting alone are preferred; where there are none, all are compared by that setting.
    A difference counts from two standard errors on.
    """
    found = []
    past = [other for other in past if me.is_alike(other)]
    names = sorted({name for other in past for name in other.settings.keys() | me.settings.keys()})
    for name in names:
        mine = me.settings.get(name)
        others = [other for other in past if other.settings.get(name) != mine]
        if not others:
            continue
        clean = [other for other in others if _differs_in(me, other) == {name}]
        pool = clean or others
        alike = [
            other for other in past if other.settings.get(name) == mine and (not clean or not _differs_in(me, other))
        ]
        own = [me, *alike]
        values: dict[str, list[Past]] = defaultdict(list)
        for other in pool:
            values[json.dumps(other.settings.get(name), sort_keys=True)].append(other)
        best = max(values.values(), key=lambda runs: _mean(runs))
        if _mean(best) - _mean(own) > 2 * math.hypot(_error(best), _error(own)):
            found.append(
                Tuning(
                    name, mine, best[0].settings.get(name), _mean(own), _mean(best), len(own), len(best), bool(clean)
                )
            )
    yield from sorted(found, key=lambda each: (not each.alone, each.my_reward - each.better_reward))


def _differs_in(one: Past, other: Past) -> set[str]:
    names = one.settings.keys() | other.settings.keys()
    return {name for name in names if one.settings.get(name) != other.settings.get(name)}


def _mean(runs: Sequence[Past]) -> float:
    return float(np.mean([each.outcome.reward for each in runs]))


def _error(runs: Sequence[Past]) -> float:
    """The standard error of the mean outcome: from the spread between runs, and at least what each one's rollouts leave."""
    within = math.sqrt(sum(each.outcome.error**2 for each in runs)) / len(runs)
    spread = float(np.std([each.outcome.reward for each in runs], ddof=1)) if len(runs) > 1 else 0.0
    return max(within, spread / math.sqrt(len(runs)))
