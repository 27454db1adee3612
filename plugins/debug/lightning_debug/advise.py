"""What is wrong in a run, by the rules that look at it while it is trained, and what past runs of the same tasks did better.

The invariant: nothing is stored, and nothing runs. An alarm says at which step it could first have been known, and a comparison
of settings how many runs are behind it and whether they differed in nothing else.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from lightning.config import Config
from lightning.errors import ConfigError
from lightning.maintenance.prune import PRUNED
from lightning.store.epochs import epoch_at, read_epochs
from lightning.store.protocol import Store
from lightning.trainer.diagnosis import Attempted, Course, Diagnosis
from lightning.trainer.plan import TRAIN
from lightning.trainer.replay import policy_fault_of, train_agents_of
from lightning.trainer.rules import diagnose
from lightning.trainer.summary import evaluations
from lightning.trainer.training_data import all_rollouts, load_groups
from lightning.trainer.weight_sync import bound_of
from lightning.types import Fault, Json, Rollout, Run, Status

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
    ("collapsed", "held-out falls", "second measure"),
)
"""Causes that stand before others: those that make the rest doubtful, then those by which what was learned is lost."""
NO_LEARNING: Final = (
    "trainer.seed", "trainer.project", "trainer.trackers", "trainer.alerts", "trainer.keep", "trainer.patience",
    "trainer.checkpoint_every", "trainer.keep_checkpoints", "trainer.max_logprob_gap", "engine.threads", "engine.device",
    "policy_server.", "gateway.host", "gateway.port", "gateway.limits.", "gateway.providers", "server.", "runner.preload",
    "runner.sandbox", "runner.ray.", "runner.k8s.", "runner.concurrency", "runner.lease_ttl", "runner.drain",
    "optimizer_model.",
)  # fmt: skip
"""Beginnings of settings that change how a run is done, and not what it learns."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """A finding with the step (from 0) after which it was first found, and whether the last step still has it."""

    found: Diagnosis
    since: int
    still: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended: its reward, with failed rollouts as 0, over so many rollouts."""

    reward: float
    rollouts: int

    @property
    def error(self) -> float:
        """The standard error of the reward, as if each were 0 or 1."""
        inside = min(max(self.reward, 0.0), 1.0)
        return math.sqrt(max(inside * (1 - inside), 0.01) / max(self.rollouts, 1))


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
    """What `advise` found. `compared` are the runs of the same model and tasks, this one included; `unread` says why rollouts
    could not be looked at, empty where they were."""

    run: str
    steps: int
    alarms: tuple[Alarm, ...]
    hints: tuple[Diagnosis, ...]
    tuning: tuple[Tuning, ...]
    compared: int
    unread: str


@dataclass(frozen=True, slots=True)
class Past:
    """A run as it is compared: its settings that matter for learning, and its outcome."""

    settings: Mapping[str, Json]
    outcome: Outcome


async def advise(store: Store, run_id: str, past: Sequence[Past] = ()) -> Advice:
    """Alarms of a run, the most urgent first and then in the order of their onset, and what `past` runs did better.

    Raises `ConfigError` for a run that is not there or has no step.
    """
    run = await store.get_run(run_id)
    if run is None:
        raise ConfigError(f"the store does not know the run {run_id}")
    course = await course_of(store, run)
    if not course.steps:
        raise ConfigError(f"the run {run_id} has no committed step: there is nothing to look at yet")
    found, unread = await _of_rollouts(store, run, len(course.steps))
    alarms = [*_of_course(course), *(Alarm(each, len(course.steps) - 1, still=True) for each in found)]
    alarms = [replace(each, found=await _with_examples(store, run_id, each.found)) for each in alarms]
    order = sorted(alarms, key=_urgency)
    loud = tuple(alarm for alarm in order if not alarm.found.minor)
    me = await past_of(store, run)
    return Advice(
        run_id,
        len(course.steps),
        loud,
        tuple(alarm.found for alarm in order if alarm.found.minor and alarm.still),
        tuple(compare(me, past)) if me else (),
        len(past) + 1,
        unread,
    )


def _urgency(alarm: Alarm) -> tuple[bool, bool, int, int]:
    cause = alarm.found.cause.partition("/")[0]
    place = next((place for place, causes in enumerate(FIRST) if cause in causes), len(FIRST))
    return not alarm.found.serious, not alarm.still, place, alarm.since


async def course_of(store: Store, run: Run) -> Course:
    """The metrics of a run's steps and its evaluations. Raises `StoreError`."""
    steps = [record.metrics for record in await store.steps(run.id, brief=True)]
    recorded = run.config.get("config")
    known = Config.model_validate(recorded) if isinstance(recorded, Mapping) else Config()
    return Course(steps, await evaluations(store, run.id), bound_of(known))


def _of_course(course: Course) -> Iterator[Alarm]:
    """What the rules find after any step, in the order in which it is found."""
    count = len(course.steps)
    looks = sorted({*range(1, count + 1, max(1, count // LOOKS)), count})
    first: dict[str, tuple[int, Diagnosis]] = {}
    now: dict[str, Diagnosis] = {}
    for steps in looks:
        seen = [result for result in course.evaluations if result.step <= steps]
        now = {each.cause: each for each in diagnose(course=Course(course.steps[:steps], seen, course.gap))}
        for cause, each in now.items():
            first.setdefault(cause, (steps - 1, each))
    for cause, (since, found) in first.items():
        yield Alarm(now.get(cause, found), since, still=cause in now)


async def _of_rollouts(store: Store, run: Run, steps: int) -> tuple[list[Diagnosis], str]:
    """What the rules find in the rollouts of the last steps, or why these cannot be read."""
    pruned = await store.get_state(run.id, PRUNED)
    if isinstance(pruned, Mapping) and pruned.get("trained"):
        return [], "its calls were removed (lightning db prune --trained), so that only its metrics were looked at"
    epochs = await read_epochs(store, run)
    found: dict[str, Diagnosis] = {}
    for step in range(max(0, steps - READ_STEPS), steps):
        epoch = epoch_at(epochs, step)
        rollouts = await all_rollouts(store, run.id, split=TRAIN, step=step)
        agents = train_agents_of(epoch)
        groups = await load_groups(store, rollouts, agents, policy_fault_of(epoch))
        attempts = [Attempted.of(member) for group in groups for member in group.trajectories]
        errors = [rollout.error for rollout in rollouts if rollout.status is Status.FAILED]
        found |= {each.cause: replace(each, steps=(step,)) for each in diagnose(attempts, agents, errors)}
    return list(found.values()), ""


async def _with_examples(store: Store, run: str, found: Diagnosis) -> Diagnosis:
    """The finding with some rollouts of its last step: failed ones where it is about these, else those that earned least."""
    if found.rollouts or not found.steps:
        return found
    rollouts = await all_rollouts(store, run, split=TRAIN, step=found.steps[-1])
    if found.cause in ("failures", "policy faults"):
        mine = found.cause == "policy faults"
        rollouts = [each for each in rollouts if each.status is Status.FAILED and (each.fault is Fault.POLICY) == mine]
    return replace(found, rollouts=tuple(each.id for each in sorted(rollouts, key=_earned)[:EXAMPLES]))


def _earned(rollout: Rollout) -> float:
    return -math.inf if rollout.reward is None else rollout.reward


async def past_of(store: Store, run: Run) -> Past | None:
    """A run as it is compared; None where it has not learned or measured anything."""
    results = await evaluations(store, run.id)
    if len(results) > 1:
        outcome = Outcome(results[-1].reward_with_failures, results[-1].rollouts)
    else:
        steps = [record.metrics for record in await store.steps(run.id, brief=True)][-LAST:]
        if not steps:
            return None
        rewards = [metrics.get("reward_with_failures", metrics.get("reward", 0.0)) for metrics in steps]
        outcome = Outcome(float(np.mean(rewards)), int(sum(metrics.get("rollouts", 0.0) for metrics in steps)))
    return Past(settings_of(run), outcome)


def is_comparable(one: Run, other: Run) -> bool:
    """Whether two runs trained the same model on the same tasks, held-out ones included."""
    return all(one.config.get(key) == other.config.get(key) for key in ("model", "tasks"))


def settings_of(run: Run) -> dict[str, Json]:
    """The settings of a run that matter for what it learns, by their dotted names."""
    algorithm = run.config.get("algorithm")
    tables = {"algorithm": algorithm, "train_agents": run.config.get("train_agents"), "": run.config.get("config")}
    flat = dict(_flat("", {name: value for name, value in tables.items() if name}))
    flat |= dict(_flat("", tables[""]))
    return {name: value for name, value in flat.items() if not name.startswith(NO_LEARNING)}


def _flat(name: str, value: Json) -> Iterator[tuple[str, Json]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}" if name else str(key), inner)
    elif name:
        yield name, value


def compare(me: Past, past: Sequence[Past]) -> Iterator[Tuning]:
    """The settings with which past runs fared better than with mine, the largest difference first.

    Runs that differ from mine in one setting alone are preferred; where there are none, all are compared by that setting.
    A difference counts from two standard errors on.
    """
    found = []
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
            values[repr(other.settings.get(name))].append(other)
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
