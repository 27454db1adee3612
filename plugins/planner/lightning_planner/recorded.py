"""The times of a recorded run, read from its store.

The invariant: only what the store holds is used, so a run can be planned from at any time, on any machine that reaches the
store. Which call followed which is decided by the recorded times: a call follows the one that ended last before it began. No
rollout begins before the step that it was made for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from lightning.algorithms.presets import Ratio
from lightning.batch import Trajectory, build_samples
from lightning.config import Config
from lightning.config import recorded_config as settings_of_record
from lightning.errors import DataError
from lightning.store.codec import ITEM, pack
from lightning.store.protocol import Store
from lightning.trainer.plan import TRAIN
from lightning.trainer.training_data import all_rollouts, is_of_interest
from lightning.trainer.weight_sync import HELD_SECONDS
from lightning.types import Json, Rollout, StepRecord, TokenIds, Transition, by_key, shared_prefix

from lightning_planner.costs import Schedule

CHUNK = 256
"""How many rollouts' calls are read at once."""


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A call with its times (Unix seconds). `ready` is when the call that it follows (`after`) ended, or when the rollout
    began; from then to `started` the agent worked. `tools` is how many tools the agent had to run in that time."""

    after: int
    ready: float
    started: float
    ended: float
    prompt: int
    fresh: int
    response: int
    tools: int


@dataclass(frozen=True, slots=True)
class RecordedRollout:
    """An ended rollout with its calls; from the last call's end to `end` the agent worked. `rows` are the tokens of its
    training rows."""

    calls: tuple[RecordedCall, ...]
    start: float
    end: float
    rows: int


@dataclass(frozen=True, slots=True)
class RecordedGroup:
    """A group that the sampling of step `step` has seen. `teaches` is true when the step was trained on it."""

    step: int
    rollouts: tuple[RecordedRollout, ...]
    teaches: bool


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """Wall seconds of a step by phase, and the tokens of its rows. `staleness` is the mean and the largest. `held` are the
    seconds of the update in which calls stood still; infinity, so all of them, where that is not recorded."""

    step: int
    seconds: Mapping[str, float]
    rows: int
    staleness: tuple[float | None, float | None]
    held: float = math.inf

    @property
    def total(self) -> float:
        """The seconds of all phases, without an evaluation."""
        return sum(self.seconds.values())


PHASES = ("rollout", "train", "checkpoint", "update")


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded run. `schedule` has the settings of its loop."""

    run: str
    model: str
    schedule: Schedule
    groups: tuple[RecordedGroup, ...]
    steps: tuple[RecordedStep, ...]
    config: Mapping[str, Json]

    @property
    def rollouts(self) -> Iterator[RecordedRollout]:
        """All rollouts of all groups."""
        return (rollout for group in self.groups for rollout in group.rollouts)

    @property
    def steady(self) -> Sequence[RecordedStep]:
        """The steps without the first one, in which processes start; all where there is only one."""
        return self.steps[1:] or self.steps


async def read_run(store: Store, run: str) -> Recorded:
    """Read a run from its store. Raises `DataError` for one without a committed step, or whose calls were pruned."""
    stored = await store.get_run(run)
    records = await store.steps(run)
    if stored is None or not records:
        raise DataError(f"run {run!r} has no committed step: give one that has trained; `lightning runs` lists them")
    points = {point.step: point.values for point in await store.metrics(run)}
    rollouts = [one for one in await all_rollouts(store, run, split=TRAIN) if one.status.ended]
    reader = _Reader(store, records, strings(stored.config.get("train_agents")))
    groups = await reader.groups(rollouts)
    if not any(rollout.calls for group in groups for rollout in group.rollouts):
        raise DataError(
            f"the calls of run {run!r} are not in its store any more (`lightning db prune`): plan from another run"
        )
    rows: dict[int, int] = {}
    for group in groups:
        rows[group.step] = rows.get(group.step, 0) + sum(rollout.rows for rollout in group.rollouts)
    steps = tuple(_step(record, points.get(record.step, {}), rows.get(record.step, 0)) for record in records)
    arguments = _table(_table(stored.config.get("algorithm")).get("arguments"))
    given, size = arguments.get("group_size"), max(len(group.rollouts) for group in groups)
    schedule = schedule_of(
        recorded_config(stored.config),
        group_size=given if isinstance(given, int) else size,
        dynamic_sampling=bool(arguments.get("dynamic_sampling")),
    )
    groups = groups if schedule.max_staleness else _within_steps(groups, steps)
    return Recorded(run, str(stored.config.get("model", "")), schedule, groups, steps, stored.config)


def forward_passes(recorded: Recorded) -> int | None:
    """Return the recorded algorithm's forward passes over each trained row before the gradient's own pass: of the reference
    model, of the policy for a loss of whole steps (`StepLoss`), and of a critic. None where the record does not show them."""
    algorithm = _table(recorded.config.get("algorithm"))
    name, arguments = algorithm.get("name"), _table(algorithm.get("arguments"))
    if name == "dpo":
        return 2
    if name == "sft":
        return 0
    own = _table(arguments.get("credit"))
    credit = own.get("type", own.get("function", arguments.get("credit")))
    if (
        name != "lightning_rl"
        or arguments.get("ratio") not in get_args(Ratio)
        or (own and not str(credit).startswith(("lightning.", "lightning_credits.")))
    ):
        return None  # a function or an object of one's own may be a critic
    correction = _table(arguments.get("correction"))
    prepares = correction.get("level", "token") != "token" or arguments["ratio"] == "sequence"
    return bool(arguments.get("kl_coefficient")) + prepares + (credit in ("critic", "lightning_credits.critic.Critic"))


def _within_steps(groups: Sequence[RecordedGroup], steps: Sequence[RecordedStep]) -> tuple[RecordedGroup, ...]:
    """Return the groups of a run in turns, changed so that no rollout begins before its step.

    The store has how long an agent ran, not when. At first all its time outside calls is taken to lie before its first call. A
    step ends no earlier than its last call, and its length is known; so a rollout may seem to begin before its step, while the
    engine trained. That part of its time is moved behind its last call.
    """
    ends = dict.fromkeys((group.step for group in groups), -math.inf)
    for group in groups:
        ends[group.step] = max([ends[group.step], *(rollout.end for rollout in group.rollouts if rollout.calls)])
    began = {step.step: ends.get(step.step, -math.inf) - step.seconds.get("rollout", math.inf) for step in steps}
    return tuple(
        replace(group, rollouts=tuple(_not_before(rollout, began[group.step]) for rollout in group.rollouts))
        for group in groups
    )


def _not_before(rollout: RecordedRollout, began: float) -> RecordedRollout:
    """Return the rollout with the same length, begun at `began` if it seems to begin earlier.

    A rollout that made a call before `began` is of an interrupted step, whose recorded seconds are those after the
    interruption: it is not changed.
    """
    if not rollout.calls or rollout.start >= began or rollout.calls[0].started < began:
        return rollout
    calls = tuple(replace(call, ready=began) if call.after < 0 else call for call in rollout.calls)
    return replace(rollout, calls=calls, start=began, end=rollout.end + began - rollout.start)


def _step(record: StepRecord, values: Mapping[str, float], rows: int) -> RecordedStep:
    seconds = {phase: values[f"seconds/{phase}"] for phase in PHASES if f"seconds/{phase}" in values}
    staleness = (record.metrics.get("staleness_mean"), record.metrics.get("staleness_max"))
    return RecordedStep(record.step, seconds, rows, staleness, values.get(HELD_SECONDS, math.inf))


def recorded_config(config: Mapping[str, Json]) -> Config:
    """Return the settings in a run's record, without those that this release does not have."""
    return settings_of_record(_table(config.get("config")))[0]


def schedule_of(config: Config, *, group_size: int, dynamic_sampling: bool, steps: int = 20) -> Schedule:
    """Return the settings of the loop, with the group size and the sampling of the algorithm."""
    trainer = config.trainer
    return Schedule(
        tasks_per_step=trainer.tasks_per_step,
        group_size=group_size,
        concurrency=config.runner.concurrency,
        max_staleness=trainer.max_staleness,
        steps=steps,
        checkpoint_every=trainer.checkpoint_every or 1,
        dynamic_sampling=dynamic_sampling,
        max_waves=trainer.max_waves,
    )


def _table(value: Json) -> Mapping[str, Json]:
    return value if isinstance(value, Mapping) else {}


def strings(value: Json) -> list[str]:
    """Return the items of a list as texts; empty for anything else."""
    return [str(item) for item in value] if isinstance(value, Sequence) and not isinstance(value, str) else []


class _Reader:
    """Reads the calls of rollouts. The steps' records say which rollouts were trained, and in which step."""

    def __init__(self, store: Store, records: Sequence[StepRecord], agents: Sequence[str]) -> None:
        self._store, self._agents = store, agents
        self._step_of = {group: record.step for record in records for group in record.groups}
        self._trained = {key for record in records for key in record.rollouts}
        self._first: TokenIds | None = None

    async def groups(self, rollouts: Sequence[Rollout]) -> tuple[RecordedGroup, ...]:
        """Return the groups that a step looked at, in the order they began."""
        taken = by_key((one for one in rollouts if one.group in self._step_of), lambda rollout: rollout.group)
        flat = [rollout for members in taken.values() for rollout in members]
        read: dict[str, RecordedRollout] = {}
        for first in range(0, len(flat), CHUNK):
            some = flat[first : first + CHUNK]
            calls = await self._store.transitions_of([(rollout.id, rollout.attempt) for rollout in some])
            read |= {rollout.id: self._rollout(rollout, own) for rollout, own in zip(some, calls, strict=True)}
        return tuple(
            RecordedGroup(
                self._step_of[group],
                tuple(read[rollout.id] for rollout in members),
                any((rollout.id, rollout.attempt) in self._trained for rollout in members),
            )
            for group, members in taken.items()
        )

    def _rollout(self, rollout: Rollout, transitions: Sequence[Transition]) -> RecordedRollout:
        ok = sorted((call for call in transitions if call.status.answered), key=lambda call: call.started_at)
        if not ok:
            return RecordedRollout((), 0.0, rollout.seconds, 0)
        begun, end = ok[0].started_at, max(call.ended_at for call in ok)
        start = min(begun, end - rollout.seconds)
        calls: list[RecordedCall] = []
        for place, call in enumerate(ok):
            before = [index for index in range(place) if ok[index].ended_at <= call.started_at]
            after = max(before, key=lambda index: ok[index].ended_at, default=-1)
            calls.append(
                RecordedCall(
                    after=after,
                    ready=ok[after].ended_at if before else start,
                    started=call.started_at,
                    ended=call.ended_at,
                    prompt=len(call.prompt_ids),
                    fresh=len(call.prompt_ids) - self._known(call, ok[:place]),
                    response=len(call.response_ids),
                    tools=len(ok[after].tool_calls) if before else 0,
                )
            )
        self._first = ok[0].prompt_ids
        return RecordedRollout(tuple(calls), start, end, self._rows(rollout, ok))

    def _known(self, call: Transition, before: Sequence[Transition]) -> int:
        """Return how many of the prompt's tokens a prefix cache has, from the rollout's earlier calls or from the rollout
        before."""
        seen = [pack(other.prompt_ids) + pack(other.response_ids) for other in before]
        if self._first is not None:
            seen.append(pack(self._first))
        prompt = pack(call.prompt_ids)
        return max((shared_prefix(prompt, other, ITEM) for other in seen), default=0)

    def _rows(self, rollout: Rollout, calls: Sequence[Transition]) -> int:
        if (rollout.id, rollout.attempt) not in self._trained:
            return 0
        trainable = tuple(is_of_interest(call, self._agents) for call in calls)
        trajectory = Trajectory(rollout, tuple(calls), trainable)
        return sum(map(len, build_samples([trajectory], [[0.0] * len(calls)])))
