"""Advice for a recorded run: alarms of the rules that also watch a training, and settings with which past runs earned more.

The invariant: nothing is stored, and no agent or model runs. An alarm names the step after which it could first be known; a
comparison of settings says how many runs it rests on, and whether they differed in nothing else.
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
from lightning.config import Config, config_model, with_settings
from lightning.errors import ConfigError
from lightning.policy_server.policies import PolicySet
from lightning.safe_text import counted
from lightning.store.protocol import PRUNED, Store
from lightning.trainer.context import Epoch, epoch_at, read_epochs
from lightning.trainer.model import policy_set_of
from lightning.trainer.plan import TRAIN, VAL, newest_generation, of_generation
from lightning.trainer.summary import Evaluation, compared_since, evaluations, is_idle
from lightning.trainer.training_data import all_rollouts, load_groups
from lightning.trainer.weight_sync import bound_of
from lightning.types import Fault, Json, Rollout, Run, Status

from lightning_debug.diagnosis import Attempted, Course, Diagnosis, Evidence, turns_of
from lightning_debug.garbled import GARBLED, look_at, with_examples
from lightning_debug.rules import diagnose, reward_follows_length

LOOKS: Final = 400
"""The rules are applied after about this many steps of a long run, evenly, and after the last one."""
READ_STEPS: Final = 2
"""Number of last steps whose rollouts are read."""
OF_IDLE: Final = ("unable tools",)
"""Causes that are also looked for in the last `READ_STEPS` earlier steps that taught nothing."""
EXAMPLES: Final = 3
"""Most rollouts that an alarm names."""
LAST: Final = 5
"""Number of last steps whose mean reward is the outcome of a run without held-out tasks."""
FIRST: Final = (
    ("drift", "gap", "not finite", "failures", "policy faults"),
    ("collapsed", "garbled", "held-out falls", "held-out stays", "second measure"),
)
"""Causes that are listed before all others: first those that cast doubt on the others, then those that lose what was
learned."""
NO_LEARNING: Final = (
    "trainer.seed", "trainer.project", "trainer.trackers", "trainer.alerts", "trainer.stage_order", "trainer.keep",
    "trainer.patience",
    "trainer.checkpoint_every", "trainer.keep_checkpoints", "trainer.max_logprob_gap", "engine.threads", "engine.device",
    "policy_server.", "gateway.host", "gateway.port", "gateway.limits.", "gateway.providers", "server.", "runner.preload",
    "runner.sandbox", "runner.ray.", "runner.k8s.", "runner.concurrency", "runner.lease_ttl", "runner.drain",
    "optimizer_model.",
)  # fmt: skip
"""Prefixes of settings that change how a run is executed and not what it learns."""
LEARNING: Final = ("policy_server.max_model_len", "policy_server.dtype", "policy_server.args")
"""Settings that begin with one of `NO_LEARNING` but do change what a run learns."""
MEASURED: Final = ("trainer.eval_temperature", "gateway.override_sampling")
"""Settings that change how rewards are measured: runs that differ in one of them are not compared."""
OF_COURSE: Final = (
    "trainer.max_logprob_gap", "trainer.order", "trainer.eval_every", "engine.dtype", "policy_server.dtype",
    "policy_server.attach",
)  # fmt: skip
"""Settings that the rules over a run's course need."""

Measure = Literal["held-out", "training"]
"""The tasks whose rewards are the outcome of a run."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """A finding, the step after which it was first found, and whether it still holds after the last step. `since` is None for a
    finding about the rollouts of the last steps, which may be older: those of few steps are read."""

    found: Diagnosis
    since: int | None
    still: bool

    @property
    def when(self) -> str:
        """When the alarm was found, in words."""
        if self.since is None:
            return "in the last steps" if self.still else "in the last steps, and not in the very last"
        first = f"first seen after {counted(self.since, 'step')}"
        return first if self.still else f"{first}, and no more at the end"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a run: its last reward, failed rollouts as 0, and the standard error of that reward."""

    reward: float
    error: float
    measure: Measure = "held-out"


@dataclass(frozen=True, slots=True)
class Tuning:
    """A setting for which past runs with another value earned more. `alone` says that those runs differ from this one in
    nothing else."""

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
    """The result of `advise`. `compared` counts the runs of the same model and tasks that were measured alike, this one
    included. `unread` says why rollouts could not be read; empty if they could. `idle` is the number of steps that trained
    nothing."""

    run: str
    steps: int
    alarms: tuple[Alarm, ...]
    hints: tuple[Diagnosis, ...]
    tuning: tuple[Tuning, ...]
    compared: int
    unread: str
    idle: int = 0


@dataclass(frozen=True, slots=True)
class Past:
    """A run for the comparison of settings: its settings that matter for learning, its outcome, and the settings that change
    how rewards are `measured`."""

    settings: Mapping[str, Json]
    outcome: Outcome
    measured: Mapping[str, Json] = field(default_factory=dict)

    def is_alike(self, other: Past) -> bool:
        """Return whether the outcomes of two runs were measured in the same way."""
        return self.outcome.measure == other.outcome.measure and self.measured == other.measured


@dataclass(frozen=True, slots=True)
class Recorded:
    """The recorded course of a run: metrics of its steps, evaluations, and the settings (`OF_COURSE`) and policies of each of
    its `epochs`."""

    steps: Sequence[Mapping[str, float]]
    evaluations: Sequence[Evaluation]
    epochs: Sequence[Epoch]
    configs: Sequence[Config]
    policies: Sequence[PolicySet | None]

    def after(self, count: int) -> Course:
        """Return the course as it was after `count` steps, at least one."""
        epoch = epoch_at(self.epochs, count)
        config = self.configs[epoch.number]
        since = compared_since([epoch for epoch in self.epochs if epoch.first <= count + 1])
        seen = [each for each in self.evaluations if each.step <= count and (not since or each.step > since)]
        turns = turns_of(self.policies[epoch.number], epoch.first, count)
        return Course(self.steps[:count], seen, bound_of(config), config.trainer.order, turns)


async def advise(store: Store, run_id: str, past: Sequence[Past] = ()) -> Advice:
    """Find the alarms of a run, by urgency and then by their first step, and settings with which `past` runs earned more.

    Raises `ConfigError` if there is no such run or it has no step.
    """
    run = await store.get_run(run_id)
    if run is None:
        raise ConfigError(f"the store does not know the run {run_id}")
    recorded = await read_course(store, run)
    if not recorded.steps:
        raise ConfigError(f"the run {run_id} has no committed step: there is nothing to look at yet")
    found, unread = await _of_rollouts(store, run, recorded)
    alarms = [*_of_course(recorded), *found]
    alarms = [replace(each, found=await _with_examples(store, run_id, each.found, recorded)) for each in alarms]
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
        sum(map(is_idle, recorded.steps)),
    )


def urgency(alarm: Alarm) -> tuple[bool, bool, int, float]:
    """Return a sort key that puts the most urgent alarms first: serious, still true, first in `FIRST`, earliest."""
    cause = alarm.found.cause.partition("/")[0]
    place = next((place for place, causes in enumerate(FIRST) if cause in causes), len(FIRST))
    return not alarm.found.serious, not alarm.still, place, math.inf if alarm.since is None else alarm.since


async def read_course(store: Store, run: Run) -> Recorded:
    """Read the metrics of a run's steps, its evaluations and its settings. Raises `StoreError`."""
    steps = [record.metrics for record in await store.steps(run.id, brief=True)]
    last, epochs = await store.last_step(run.id), await read_epochs(store, run)
    dtype = last.context.get("dtype") if last else None
    known, policies = [_known(epoch, dtype) for epoch in epochs], [_policies(epoch) for epoch in epochs]
    return Recorded(steps, await evaluations(store, run.id), epochs, known, policies)


def _policies(epoch: Epoch) -> PolicySet | None:
    """Return the policies of an epoch; None for one policy, and for settings that this release does not accept."""
    try:
        return policy_set_of(epoch.config)
    except ConfigError:
        return None


def _known(epoch: Epoch, dtype: Json) -> Config:
    """Return the settings (`OF_COURSE`) of an epoch, without values that this release does not accept. `dtype` is the one that
    training used: it replaces the setting `auto`, except for an attached policy server, whose dtype is not known."""
    given = {name: epoch.setting(*name.split(".")) for name in OF_COURSE}
    for name in ("engine.dtype", "policy_server.dtype"):
        if given[name] in (None, "auto") and (name == "engine.dtype" or not given["policy_server.attach"]):
            given[name] = dtype
    config = Config()
    for name, value in given.items():
        if value is not None:
            with suppress(ConfigError):  # a value that this release does not accept
                config = with_settings(config, {name: value})
    return config


def _of_course(recorded: Recorded) -> Iterator[Alarm]:
    """Yield what the rules find after any step, each finding once, by the step after which it was first found."""
    count = len(recorded.steps)
    looks = sorted({*range(1, count + 1, max(1, count // LOOKS)), count})
    first: dict[str, tuple[int, Diagnosis]] = {}
    now: dict[str, Diagnosis] = {}
    for steps in looks:
        now = {each.cause: each for each in diagnose(course=recorded.after(steps))}
        for cause, each in now.items():
            first.setdefault(cause, (steps, each))
    for cause, (since, found) in first.items():
        yield Alarm(now.get(cause, found), since, still=cause in now)


async def _of_rollouts(store: Store, run: Run, recorded: Recorded) -> tuple[list[Alarm], str]:
    """Return what the rules find in the rollouts of the last steps and of the last ones that taught nothing, and why these
    cannot be read (empty if they can)."""
    pruned = await store.get_state(run.id, PRUNED)
    if isinstance(pruned, Mapping) and pruned.get("trained"):
        return [], "its calls were removed (lightning db prune --trained), so that only its metrics were looked at"
    steps = len(recorded.steps)
    first = max(0, steps - READ_STEPS) + 1
    idle = [step for step, metrics in enumerate(recorded.steps[: first - 1], 1) if metrics.get("groups_used") == 0]
    found: dict[str, Alarm] = {}
    together: list[Attempted] = []
    for step in [*idle[-READ_STEPS:], *range(first, steps + 1)]:
        epoch = epoch_at(recorded.epochs, step)
        rollouts = await all_rollouts(store, run.id, split=TRAIN, step=step)
        agents = epoch.train_agents
        groups = await load_groups(store, rollouts, agents, epoch.policy_fault)
        attempts = [Attempted.of(member) for group in groups for member in group.trajectories]
        errors = [rollout.error for rollout in rollouts if rollout.status is Status.FAILED]
        for each in diagnose(attempts, agents, errors):
            if step >= first or each.cause in OF_IDLE:
                before = found.get(each.cause)
                since = before.since if before else None if step >= first else step
                found[each.cause] = Alarm(replace(each, steps=(step,)), since, still=step == steps)
        together += attempts if step >= first else ()
    for each in reward_follows_length(Evidence(together)):  # one step may have too few pairs
        found[each.cause] = Alarm(replace(each, steps=tuple(range(first, steps + 1))), None, still=True)
    return list(found.values()), ""


async def _with_examples(store: Store, run: str, found: Diagnosis, recorded: Recorded) -> Diagnosis:
    """Add to a finding the rollouts of its last step that earned least: held-out, failed or garbled ones if the finding is
    about these."""
    if found.rollouts or not found.steps:
        return found
    held_out = found.cause in ("held-out falls", "held-out stays")
    rollouts = await all_rollouts(store, run, split=VAL if held_out else TRAIN, step=found.steps[-1])
    if found.cause == GARBLED:
        epoch = epoch_at(recorded.epochs, found.steps[-1])
        groups = await load_groups(store, rollouts, epoch.train_agents, epoch.policy_fault)
        return with_examples(found, look_at(groups), recorded.steps[: found.steps[-1]])
    if held_out:  # rollouts without a reward last
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
    """Return the configuration of a run's last step."""
    return (await _epochs_taken(store, run))[-1].config


async def _epochs_taken(store: Store, run: Run) -> list[Epoch]:
    last = await store.last_step(run.id)
    return [epoch for epoch in await read_epochs(store, run) if epoch.first <= (last.step if last else 1)]


async def past_of(store: Store, run: Run, *, changed: bool = False) -> Past | None:
    """Return a run for the comparison of settings; None if it has no outcome. A run whose settings changed on the way gives
    None, too, unless `changed` is true: then its last settings and what was measured under them count."""
    epochs = await _epochs_taken(store, run)
    if len(epochs) > 1 and not changed:
        return None
    outcome = await _outcome(store, run.id, epochs[-1])
    if outcome is None:
        return None
    found = settings_of(epochs[-1].config)
    measured = {name: found.pop(name) for name in MEASURED}
    if outcome.measure == "training":  # their rewards depend on the choice of tasks
        measured["trainer.order"] = found["trainer.order"]
    return Past(found, outcome, measured)


async def _outcome(store: Store, run: str, epoch: Epoch) -> Outcome | None:
    """Return the last held-out reward measured in this epoch, else its last training rewards, unless tasks were chosen by
    reward (trainer.order); None if there is neither."""
    results = [result for result in await evaluations(store, run) if result.step >= epoch.first and result.known]
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
    """Return the training rewards of a step as an evaluation. If their deviation was not recorded, half of the mean's size or
    of 1, whichever is larger, is assumed."""
    reward = metrics.get("reward")
    rollouts, failed = int(metrics.get("rollouts", 0.0)), int(metrics.get("failed", 0.0))
    deviation = metrics.get("reward_std", max(abs(reward or 0.0), 1.0) / 2)
    return Evaluation(step, reward, rollouts, failed, deviation=deviation)


def is_comparable(one: Mapping[str, Json], other: Mapping[str, Json]) -> bool:
    """Return whether two configurations have the same model and the same tasks, held-out ones included."""
    return all(one.get(key) == other.get(key) for key in ("model", "tasks"))


def settings_of(config: Mapping[str, Json]) -> dict[str, Json]:
    """Return the settings that matter for learning, by dotted name: each `section.field` (a table is one value) and the
    algorithm's arguments. A setting that the configuration lacks has its default."""
    recorded, found = config.get("config"), dict(_of_algorithm(config))
    found["train_agents"] = config.get("train_agents")
    for section, defaults in config_model()().model_dump(mode="json").items():
        given = recorded.get(section) if isinstance(recorded, Mapping) else None
        for name, value in (defaults | (dict(given) if isinstance(given, Mapping) else {})).items():
            found[f"{section}.{name}"] = value
    return {name: value for name, value in found.items() if name in LEARNING or not name.startswith(NO_LEARNING)}


def _of_algorithm(config: Mapping[str, Json]) -> Iterator[tuple[str, Json]]:
    """Yield the algorithm's name and arguments as dotted settings."""
    described = config.get("algorithm")
    for key, value in described.items() if isinstance(described, Mapping) else ():
        if key == "arguments" and isinstance(value, Mapping):
            yield from ((f"algorithm.arguments.{name}", argument) for name, argument in value.items())
        else:
            yield f"algorithm.{key}", value


def compare(me: Past, past: Sequence[Past]) -> Iterator[Tuning]:
    """Yield the settings for which past runs with another value earned more than `me`, the largest difference first.

    Only runs that were measured alike count. Runs that differ from mine in one setting only are preferred; without such runs,
    all are compared by that setting. A difference must exceed two standard errors.
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
    """Return the standard error of the mean outcome of runs: the larger of the one from the spread between runs and the one
    from the error within each run."""
    within = math.sqrt(sum(each.outcome.error**2 for each in runs)) / len(runs)
    spread = float(np.std([each.outcome.reward for each in runs], ddof=1)) if len(runs) > 1 else 0.0
    return max(within, spread / math.sqrt(len(runs)))
