"""The sampler for training on a record: rollouts of other runs, or served conversations that were rated.

The invariant: the rollouts of a step are copied into the run, with the tokens and logprobs of the policy that sampled them, so
that an audit needs the run alone. A copied call has the policy of the run that its agent has there, whichever sampled it. The
record's rollouts are fixed when the run begins; feedback that comes later is for the
next run. The age of tokens is counted from the newest version in the record.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from lightning.algorithms.protocol import head_of
from lightning.batch import Group, is_trained
from lightning.errors import ConfigError
from lightning.plugins import plugins
from lightning.policy_server.policies import PolicySet
from lightning.safe_text import counted
from lightning.store.pages import each_rollout
from lightning.store.places import existing_store, split_reference
from lightning.store.protocol import Store
from lightning.store.url import redacted
from lightning.trainer.algorithm import AlgorithmSchedule
from lightning.trainer.context import PolicyFault
from lightning.trainer.plan import TRAIN, fixed_order, units_from
from lightning.trainer.samplers import RECORDED, Asked, Brought, Sampled, TurnSampler
from lightning.trainer.training_data import all_rollouts, load_groups, of_groups, of_interest
from lightning.types import CONVERSATION_ID, POLICY, SERVED, Json, Lease, Outcome, Rollout, Task, Transition, by_key

LEASE_SECONDS = 600.0
TRIED = 256
"""A record with at most this many groups is tried with the algorithm before anything is started; it is also the number of
rollouts that are read at once."""


@dataclass(frozen=True, slots=True)
class Record:
    """The scored rollouts of a store, in the order of their runs. `newest` has, by rollout, the newest version in its source
    (its run, or all served conversations), from which the age of its tokens is counted. `unrated` counts the conversations
    without a reward."""

    store: Store
    place: str
    rollouts: tuple[Rollout, ...]
    newest: Mapping[str, int]
    unrated: int = 0

    @property
    def tasks(self) -> list[Task]:
        """The tasks of the record, each once."""
        return list({rollout.task.id: rollout.task for rollout in self.rollouts}.values())

    def described(self) -> dict[str, Json]:
        """Return the description of the record for a run's configuration."""
        return {"place": self.place, "rollouts": [rollout.id for rollout in self.rollouts], "newest": dict(self.newest)}

    def groups(self, size: int) -> list[tuple[Rollout, ...]]:
        """Split the rollouts of each task into groups of at most `size`."""
        by_task = by_key(self.rollouts, lambda rollout: rollout.task.id)
        return [
            tuple(members[first : first + size])
            for members in by_task.values()
            for first in range(0, len(members), size)
        ]


@asynccontextmanager
async def open_record(place: str, pinned: Json, project: str) -> AsyncIterator[Record]:
    """Open the record at a place: a run's folder, a database or its URL; with `#RUN` appended, that run alone.

    `pinned` is the description (`Record.described`) from a resumed run's configuration; None takes all rollouts that are there
    now. Raises `ConfigError` for a place without scored rollouts, and if some that the run began with are gone.
    """
    where, _, only = split_reference(place, "#")
    async with plugins().opened_store(existing_store(where)) as store:
        yield await _read(store, redacted(place), only, pinned, project)


async def _read(store: Store, place: str, only: str, pinned: Json, project: str) -> Record:
    runs = [run.id for run in await store.list_runs(project, brief=True) if only in ("", run.id)]
    if not runs:
        raise ConfigError(
            f"{place} has no run{f' {only}' if only else ''} of project {project!r}: `lightning runs --runs PLACE` lists the "
            "runs of a place"
        )
    found: list[Rollout] = []
    unrated, newest, served = 0, dict[str, int](), list[str]()
    for run in reversed(runs):
        last = await store.last_step(run)
        mine = [each async for each in each_rollout(store, run) if each.split in (TRAIN, SERVED) and each.attempt]
        scored = [rollout for rollout in mine if rollout.reward is not None]
        unrated += sum(rollout.id.startswith(CONVERSATION_ID) and rollout.reward is None for rollout in mine)
        found += scored
        if last is None:
            served += [rollout.id for rollout in scored]
        else:
            newest |= {rollout.id: last.policy_version for rollout in scored}
    if isinstance(pinned, Mapping):
        return _pinned(store, place, found, pinned)
    if not found:
        raise ConfigError(
            f"{place} has no rollout with a reward: {counted(unrated, 'conversation waits', 'conversations wait')} "
            "for feedback (POST /v1/feedback)"
        )
    newest |= dict.fromkeys(served, await _newest(store, [rollout for rollout in found if rollout.id in set(served)]))
    return Record(store, place, tuple(found), newest, unrated)


def _pinned(store: Store, place: str, found: Sequence[Rollout], pinned: Mapping[str, Json]) -> Record:
    there, names = {rollout.id: rollout for rollout in found}, pinned.get("rollouts")
    wanted = list(map(str, names)) if isinstance(names, list | tuple) else []
    if gone := [name for name in wanted if name not in there]:
        raise ConfigError(
            f"{place} no longer has {counted(len(gone), 'rollout')} that the run began with, such as {gone[0]}: restore it"
        )
    newest = pinned.get("newest")
    known = {str(name): int(str(value)) for name, value in newest.items()} if isinstance(newest, Mapping) else {}
    return Record(store, place, tuple(there[name] for name in wanted), known)


async def _newest(store: Store, rollouts: Sequence[Rollout]) -> int:
    """Return the newest policy version that sampled any of these rollouts; 0 for none."""
    newest = 0
    for first in range(0, len(rollouts), TRIED):
        some = [(rollout.id, rollout.attempt) for rollout in rollouts[first : first + TRIED]]
        for calls in await store.transitions_of(some):
            newest = max([newest, *(run.version for call in calls for run in call.versions)])
    return newest


async def check_record(
    record: Record,
    schedule: AlgorithmSchedule,
    train_agents: Sequence[str],
    policy_fault: PolicyFault,
    several: PolicySet | None = None,
) -> None:
    """Raise `ConfigError` if the algorithm finds nothing to learn in the record. Nothing is checked for an algorithm with a
    critic or a record of more than `TRIED` groups. `several` are the policies of a run that has more than one."""
    algorithm = schedule.at(1)
    units = record.groups(algorithm.group_size)
    if head_of(algorithm) or len(units) > TRIED:
        return
    members = [
        replace(rollout, group=f"{place}", index=index)
        for place, unit in enumerate(units)
        for index, rollout in enumerate(unit)
    ]
    groups = await load_groups(record.store, members, train_agents, policy_fault)
    batch = algorithm.batch(of_interest([_of_run(group, several) for group in groups], train_agents))
    if not batch.samples:
        reasons = ", ".join(f"{count} x {reason}" for reason, count in batch.skipped.items()) or "nothing to train"
        compared = batch.skipped.keys() & {"too_few_succeeded", "too_few_trainable"}
        alone = max(map(len, units)) == 1 and compared
        cure = (
            "no task was recorded twice, and rollouts of one task are compared: use sft:threshold=0.5 or "
            "reinforce++:group_size=1, which need no second one"
            if alone
            else "look at the rewards (`lightning runs show`), or use another algorithm"
        )
        raise ConfigError(f"{algorithm.name} finds nothing to learn in {record.place} ({reasons}): {cure}")


class RecordedSampler(TurnSampler):
    """The sampler `recorded`, which takes each step's groups from a record. Agents run for held-out evaluations only."""

    api, carries_out = 1, (RECORDED,)

    def __init__(self, asked: Asked) -> None:
        if fixed_order(asked.config.trainer.order) is None:
            raise ConfigError("a record has no tasks to choose from: set trainer.order to 'shuffled' or 'given'")
        self.asked = asked
        self.held: Record | None = None
        """The record; None until `record` has opened it."""
        self._groups: dict[int, list[tuple[Rollout, ...]]] = {}
        self._seen: set[str] = set()
        self._looked_at = 1

    async def record(self, resources: AsyncExitStack, known: Json, out: Path, project: str) -> Brought:
        """Open the record and check it. Return its tasks, its description for the run's configuration, and the steps of one
        pass. Raises `ConfigError` as `open_record` and `check_record` do."""
        place, config, schedule = self.asked.recorded or "", self.asked.config.trainer, self.asked.schedule
        held = await resources.enter_async_context(open_record(_beside(place, out), known, project))
        await check_record(
            held, schedule, self.asked.agents, config.policy_fault, plugins().policy_set(self.asked.config)
        )
        self.held, tasks = held, held.tasks
        unrated = (
            f"; {counted(held.unrated, 'conversation without feedback is', 'conversations without feedback are')} left out"
            if held.unrated
            else ""
        )
        said = f"{counted(len(held.rollouts), 'recorded rollout')} of {counted(len(tasks), 'task')} in {held.place}{unrated}"
        steps = steps_of_pass(len(held.groups(schedule.at(1).group_size)), config.tasks_per_step)
        return Brought(tasks, held.described(), steps, said)

    @property
    def _record(self) -> Record:
        assert self.held is not None, "it is open before a step"
        return self.held

    @property
    def _worker(self) -> str:
        return f"{self.stack.run.id}/{RECORDED}"

    async def start(self) -> None:
        """Finish the copies that a crash interrupted, so that no agent runs these rollouts."""
        await self.stack.store.release(self._worker)
        known = await all_rollouts(self.stack.store, self.stack.run.id, split=TRAIN)
        for step in sorted({rollout.step for rollout in known if not rollout.status.ended}):
            await self._copy(step)

    async def step(self, step: int) -> Sampled:
        """Copy the step's rollouts from the record, and return their groups. `staleness_mean` and `staleness_max` are the age
        of the tokens in versions; `recorded_share` is the share of the record that the run has used so far."""
        began = time.monotonic()
        self.reporter.phase(f"recorded rollouts of step {step}")
        sources = await self._copy(step)
        known = await all_rollouts(self.stack.store, self.stack.run.id, split=TRAIN, step=step)
        rollouts = of_groups(known, list(dict.fromkeys(self._group(step, place) for place, _ in sources.values())))
        groups = await load_groups(self.stack.store, rollouts, self.agents, self.config.policy_fault)
        newest = {name: self._record.newest.get(source.id, 0) for name, (_, source) in sources.items()}
        metrics = ages(step - 1, groups, newest) | {"recorded_share": self._share(step)}
        return Sampled(rollouts, groups, time.monotonic() - began, metrics, elsewhere=True)

    def _group(self, step: int, place: int) -> str:
        return f"{self.stack.run.id}/{step}/{place}"

    def _units(self, step: int) -> list[tuple[Rollout, ...]]:
        """Return the groups of a step: the next ones of a pass over the record. The last step of a pass may have fewer."""
        order = fixed_order(self.config.order)
        assert order is not None, "refused before"
        size = self.schedule.at(step).group_size
        if size not in self._groups:
            self._groups[size] = self._record.groups(size)
        groups = self._groups[size]
        count = self.config.tasks_per_step
        over, place = divmod(step - 1, steps_of_pass(len(groups), count))
        left = min(count, len(groups) - place * count)
        names = [unit[0].id for unit in groups]
        return units_from(groups, names, over * len(groups) + place * count, left, self.config.seed, order)

    def _share(self, step: int) -> float:
        while self._looked_at <= step:
            self._seen |= {rollout.id for unit in self._units(self._looked_at) for rollout in unit}
            self._looked_at += 1
        return len(self._seen) / len(self._record.rollouts)

    async def _copy(self, step: int) -> dict[str, tuple[int, Rollout]]:
        """Copy the rollouts of a step into the run's store, unless they are there. Return, by the copy's id, its group's index
        in the step and the recorded rollout."""
        run, store = self.stack.run.id, self.stack.store
        sources: dict[str, tuple[int, Rollout]] = {}
        planned: list[Rollout] = []
        for place, unit in enumerate(self._units(step)):
            for index, source in enumerate(unit):
                name, group = f"{self._group(step, place)}/{index}", self._group(step, place)
                attempts = self.stack.config.runner.max_attempts
                planned.append(Rollout(name, run, source.task, group, step, TRAIN, index, attempts))
                sources[name] = place, source
        await store.create_rollouts(planned)
        known = await all_rollouts(store, run, split=TRAIN, step=step)
        waiting = {rollout.id for rollout in known if not rollout.status.ended} & sources.keys()
        while waiting:
            leases = await store.lease(run, self._worker, limit=len(waiting), ttl=LEASE_SECONDS)
            mine = [lease for lease in leases if lease.rollout.id in waiting]
            if not mine:
                raise ConfigError(
                    f"{len(waiting)} rollouts of step {step} of {run} are held by another process: end it"
                )
            await self._fill(mine, [sources[lease.rollout.id][1] for lease in mine])
            waiting -= {lease.rollout.id for lease in mine}
        return sources

    async def _fill(self, leases: Sequence[Lease], sources: Sequence[Rollout]) -> None:
        """Store the calls and outcomes of the recorded rollouts under the leased ones, which this completes."""
        named = [(source.id, source.attempt) for source in sources]
        several = plugins().policy_set(self.stack.config)
        calls, ended = await self._record.store.transitions_of(named), await self._record.store.attempts_of(named)
        await self.stack.store.append(
            [
                replace(own_call(call, several), rollout=lease.rollout.id, attempt=lease.attempt)
                for lease, made in zip(leases, calls, strict=True)
                for call in made
            ]
        )
        outcomes = [
            Outcome(
                source.reward,
                source.rewards,
                seconds=source.seconds,
                tool_events=attempt.tool_events,
                step_rewards=attempt.step_rewards,
                step_states=attempt.step_states,
            )
            for source, attempt in zip(sources, ended, strict=True)
        ]
        complete = self.stack.store.complete
        for done in await asyncio.gather(
            *(complete(lease.rollout.id, lease.attempt, each) for lease, each in zip(leases, outcomes, strict=True))
        ):
            self.finished(done)


def own_call(call: Transition, several: PolicySet | None) -> Transition:
    """Return a recorded call as one of a run with these policies (None: with one): its policy is that which the call's agent
    has in the run. Raises `ConfigError` for a call that several policies match."""
    policy = POLICY if several is None else several.policy_of(call.caller, call.requested_model)
    return replace(call, versions=tuple(replace(run, policy=policy) for run in call.versions))


def _of_run(group: Group, several: PolicySet | None) -> Group:
    """Return a group with its calls as `own_call` returns them."""
    return Group(
        group.id,
        tuple(
            replace(member, transitions=tuple(own_call(call, several) for call in member.transitions))
            for member in group.trajectories
        ),
    )


def steps_of_pass(groups: int, tasks_per_step: int) -> int:
    """Return the number of steps that one pass over this many recorded groups takes."""
    return -(-groups // tasks_per_step)


def ages(version: int, groups: Sequence[Group], newest: Mapping[str, int]) -> dict[str, float]:
    """Return `staleness_mean` and `staleness_max`: how many versions older than `version` the trained tokens of recorded
    rollouts are, over tokens; empty without any. `newest` has, by rollout, the newest version of its source; each step of this
    run makes tokens one version older."""
    found = list(_aged(version, groups, newest))
    if not found:
        return {}
    old, tokens = np.array(found, dtype=np.float64).T
    return {"staleness_mean": float(np.average(old, weights=tokens)), "staleness_max": float(old.max())}


def _aged(version: int, groups: Sequence[Group], newest: Mapping[str, int]) -> Iterator[tuple[int, int]]:
    """Yield `(age in versions, number of tokens)` for each span of trained tokens of one version."""
    for member in (member for group in groups for member in group.trajectories):
        for call, trainable in zip(member.transitions, member.trainable, strict=True):
            if not is_trained(call, trainable):
                continue
            stops = [*(run.start for run in call.versions[1:]), len(call.response_ids)]
            for run, stop in zip(call.versions, stops, strict=True):
                if stop > run.start:
                    yield max(0, newest[member.rollout.id] - run.version) + version, stop - run.start


def _beside(place: str, out: Path) -> str:
    """Return the place of a record. A name that does not exist as a path may be that of a run's folder beside `out`."""
    where, hash_sign, only = split_reference(place, "#", out.parent)
    beside = out.parent / where
    if "://" not in where and not Path(where).exists() and beside.exists():
        return f"{beside}{hash_sign}{only}"
    return place
