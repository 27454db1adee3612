"""Derives every trained batch of a run again from its store and says where it is not what was trained.

The invariant: a clean audit means that each token id, logprob, reward, version and the order of each step are what the
engine computed on; any single change to them is found and named. Weights and advantages are, too, but for the steps that it
names as changed by a loop of somebody's own.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lightning.algorithms.protocol import Algorithm, needs_critic
from lightning.batch import Group, begins_at
from lightning.errors import DataError, StoreError
from lightning.store.protocol import PRUNED, Store
from lightning.store.rollout_state import Reuse, reuse_of
from lightning.trainer.context import NUMERIC, other_stages, stages_of
from lightning.trainer.epochs import Epoch, epoch_at, read_epochs
from lightning.trainer.own_loop import own_step
from lightning.trainer.plan import TRAIN
from lightning.trainer.runs import rebuild_algorithm
from lightning.trainer.training_data import all_rollouts, is_batch_of, load_groups, recorded_values, rollout_digest
from lightning.types import Rollout, StepRecord

from lightning_proof.bring_forward import policy_fault_of, recorded_teacher, train_agents_of


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it was trained. `rollout` is a rollout's or a group's id, empty when it is the whole step."""

    step: int
    rollout: str
    problem: str


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What an audit looked at and found. `rederived` is False when only the user's own code can make an algorithm of the run
    again, so that recorded data, but not advantages, could be compared. `warnings` say where steps of one config epoch were
    computed otherwise than those before them, so that they can be taken again but for rounding only, or where calls,
    attempts or steps were made with other stages. `rollouts` counts each
    once; `reused` is how often one was trained again by a step that declares it (a replay buffer), which `calls` and `tokens`
    count, too. `changed` are the steps of a loop of somebody's own (`Trainer.session`) that were computed on other rows than
    the run's algorithm made: some of them, or with other weights or advantages."""

    run: str
    steps: int
    rollouts: int
    calls: int
    tokens: int
    rederived: bool
    findings: tuple[Finding, ...]
    epochs: int = 1
    warnings: tuple[str, ...] = ()
    reused: int = 0
    changed: tuple[int, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing was found that is not as it was trained."""
        return not self.findings


async def audit(store: Store, run: str, algorithm: Algorithm | None = None) -> AuditReport:
    """Audit a run, each step by the algorithm and the settings of its own config epoch. `algorithm` is needed only for epochs
    whose own cannot be rebuilt from its stored arguments.

    Raises `StoreError` when there is no such run, or calls that it was trained on were removed.
    """
    stored = await store.get_run(run)
    if stored is None:
        raise StoreError(f"there is no run {run!r} in this store; `lightning runs` lists them")
    pruned = await store.get_state(run, PRUNED)
    if isinstance(pruned, Mapping) and pruned.get("trained"):
        raise StoreError(
            f"calls that run {run!r} was trained on were removed (`lightning db prune --trained`), so that nothing can be "
            "proven any more; restore a backup from before to audit it"
        )
    epochs = await read_epochs(store, stored)
    algorithms = {epoch.number: rebuild_algorithm(epoch.config) or algorithm for epoch in epochs}
    records = await store.steps(run)
    gaps = [record for number, record in enumerate(records, 1) if record.step != number]
    declared, undeclared = _declared(records)
    changed, unreadable = _changed(records)
    findings = [Finding(record.step, "", "a step before this one is missing") for record in gaps]
    findings += [*undeclared, *_repeated(records, declared, epochs), *unreadable]
    committed = {record.step for record in records}
    everything = await all_rollouts(store, run, split=TRAIN)
    findings.extend(
        Finding(rollout.trained_at_step, rollout.id, "was trained in a step that has no record")
        for rollout in everything
        if rollout.trained_at_step is not None and rollout.trained_at_step not in committed
    )
    counts = Counter[str]()
    for record, members in _members(records, everything):
        epoch = epoch_at(epochs, record.step)
        reused = declared[record.step].rollouts
        found, counted = await _step(store, record, epoch, members, algorithms[epoch.number], reused)
        findings.extend(found)
        counts.update(counted)
    used_epochs = {epoch_at(epochs, record.step).number for record in records}
    return AuditReport(
        run,
        len(records),
        counts["rollouts"] - counts["reused"],
        counts["calls"],
        counts["tokens"],
        all(algorithms[number] is not None for number in used_epochs or {0}),
        tuple(findings),
        max(1, len(used_epochs)),
        tuple(_rounded(records, epochs)),
        counts["reused"],
        changed,
    )


def _members(records: Sequence[StepRecord], rollouts: Sequence[Rollout]) -> Iterator[tuple[StepRecord, list[Rollout]]]:
    """Each step with the rollouts that it looked at."""
    by_group: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        by_group.setdefault(rollout.group, []).append(rollout)
    for record in records:
        yield record, [member for group in record.groups for member in by_group.get(group, [])]


async def _step(
    store: Store,
    record: StepRecord,
    epoch: Epoch,
    members: Sequence[Rollout],
    algorithm: Algorithm | None,
    reused: Collection[str],
) -> tuple[list[Finding], dict[str, int]]:
    """What is wrong with a step, and how much of it was looked at."""
    try:
        groups = await load_groups(store, members, train_agents_of(epoch), policy_fault_of(epoch))
        if algorithm is not None and needs_critic(algorithm):
            groups = await recorded_values(store, record.run, record.step, groups)
    except StoreError as error:
        return [Finding(record.step, "", f"cannot be read: {error}")], {}
    findings = [
        *_compare(record, epoch, members, groups, algorithm, reused),
        *_no_branches(record, groups),
        *_too_stale(record, groups, epoch.max_staleness),
    ]
    used = {name for name, _ in record.rollouts}
    trajectories = [member for group in groups for member in group.trajectories if member.rollout.id in used]
    calls = [call for member in trajectories for call in member.transitions]
    tokens = sum(len(call.response_ids) for call in calls)
    again = sum(member.rollout.id in reused for member in trajectories)
    return findings, {"rollouts": len(trajectories), "calls": len(calls), "tokens": tokens, "reused": again}


def _compare(
    record: StepRecord,
    epoch: Epoch,
    members: Sequence[Rollout],
    groups: Sequence[Group],
    algorithm: Algorithm | None,
    reused: Collection[str],
) -> Iterator[Finding]:
    trajectories = {member.rollout.id: member for group in groups for member in group.trajectories}
    by_id = {rollout.id: rollout for rollout in members}
    for (name, attempt), digest in zip(record.rollouts, record.digests, strict=False):
        rollout, trajectory = by_id.get(name), trajectories.get(name)
        if rollout is None or trajectory is None or rollout.attempt != attempt:
            yield Finding(record.step, name, f"attempt {attempt} was trained, but is not the stored outcome")
        elif rollout_digest(trajectory) != digest:
            yield Finding(record.step, name, "its stored ids, logprobs, reward or versions are not the trained ones")
        elif name not in reused and rollout.trained_at_step != record.step:
            yield Finding(record.step, name, f"marked as trained at step {rollout.trained_at_step}")
        if rollout is not None and name in reused and (problem := _not_reusable(record, rollout)):
            yield Finding(record.step, name, problem)
    if record.policy_version != record.step:
        yield Finding(record.step, "", f"says it made version {record.policy_version}, not {record.step}")
    if record.context.get("epoch", epoch.number) != epoch.number:
        named = record.context["epoch"]
        yield Finding(record.step, "", f"says it is of config epoch {named}, and the run's are other ones")
    if len(record.rollouts) != len(record.digests):
        yield Finding(record.step, "", "has not one digest for each rollout")
    if algorithm is not None:
        yield from _compare_batch(record, groups, algorithm)


def _compare_batch(record: StepRecord, groups: Sequence[Group], algorithm: Algorithm) -> Iterator[Finding]:
    try:
        batch = algorithm.batch(groups)
        alike = is_batch_of(record, batch)
    except DataError as error:
        yield Finding(record.step, "", f"its batch cannot be built again: {error}")
        return
    if tuple((rollout.id, rollout.attempt) for rollout in batch.used) != record.rollouts:
        yield Finding(record.step, "", "its rollouts, or their order, are not the trained ones")
    if not alike:
        problem = "its training rows are not the ones the engine computed on"
        if batch.loss is not None:
            problem += ", or its loss was another (which pairs are compared, and how)"
        yield Finding(record.step, "", problem)


def _changed(records: Sequence[StepRecord]) -> tuple[tuple[int, ...], list[Finding]]:
    """The steps that a loop of somebody's own computed on other rows than the batch's, and where that cannot be told."""
    changed, findings = [], []
    for record in records:
        try:
            own = own_step(record.context)
        except DataError as error:
            findings.append(Finding(record.step, "", str(error)))
            continue
        if own is not None and own.digest != record.digest:
            findings.append(
                Finding(record.step, "", "its updates, their rates or their rows are not the recorded ones")
            )
        elif own is not None and own.changed:
            changed.append(record.step)
    return tuple(changed), findings


def _declared(records: Sequence[StepRecord]) -> tuple[dict[int, Reuse], list[Finding]]:
    """What each step declares as reused, and where that cannot be read."""
    found, findings = {}, []
    for record in records:
        try:
            found[record.step] = reuse_of(record)
        except DataError as error:
            found[record.step] = Reuse()
            findings.append(Finding(record.step, "", str(error)))
    return found, findings


def _not_reusable(record: StepRecord, rollout: Rollout) -> str:
    """Why a step cannot have reused a rollout: it was not there yet, or is not marked as trained before; empty where it can."""
    if rollout.step > record.step:
        return f"declared as reused, and sampled for step {rollout.step}, which is later"
    first = rollout.trained_at_step
    return (
        ""
        if first is not None and first < record.step
        else f"declared as reused, and marked as trained at step {first}"
    )


def _repeated(
    records: Sequence[StepRecord], declared: Mapping[int, Reuse], epochs: Sequence[Epoch]
) -> Iterator[Finding]:
    """Rollouts that were trained, and groups that were looked at, by more steps than the run allows and the step declares."""
    trained_in: dict[str, list[int]] = {}
    taken_by: dict[str, list[int]] = {}
    for record in records:
        limit, reuse = epoch_at(epochs, record.step).max_reuse, declared[record.step]
        if reuse.rollouts and reuse.limit != limit:
            problem = f"declares a reuse under trainer.max_reuse = {reuse.limit}, and the run's is {limit}"
            yield Finding(record.step, "", problem)
        for name, _ in record.rollouts:
            before = trained_in.setdefault(name, [])
            if problem := _problem_of(before, limit, declared=name in reuse.rollouts):
                yield Finding(record.step, name, problem)
            before.append(record.step)
        for group in record.groups:
            before = taken_by.setdefault(group, [])
            if len(before) > limit:
                yield Finding(record.step, group, f"taken already by step {_listed(before)}")
            before.append(record.step)


def _problem_of(before: Sequence[int], limit: int, *, declared: bool) -> str:
    """What is wrong with a rollout in a step, where the steps `before` trained it, too; empty where nothing is."""
    if declared and not before:
        return "declared as reused, and no step before trained it"
    if before and not declared:
        return f"trained already in step {_listed(before)}, and not declared as reused"
    if len(before) > limit:
        return f"trained already in step {_listed(before)}, and trainer.max_reuse = {limit}"
    return ""


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps))


def _no_branches(record: StepRecord, groups: Sequence[Group]) -> Iterator[Finding]:
    """Branches of which the record does not show that they begin as their parent did: one of their calls has the prompt of the
    call that they branch at, token for token."""
    for group in groups:
        calls = {call.key: call for member in group.trajectories for call in member.transitions}
        for member in group.trajectories:
            if member.rollout.parent is None:
                continue
            at, name = calls.get(member.rollout.parent), member.rollout.id
            if at is None:
                problem = f"branches at a call that its group does not have: {member.rollout.parent}"
                yield Finding(record.step, name, problem)
            elif not begins_at(member.transitions, at):
                problem = f"has no call with the prompt of that at which it branches, {member.rollout.parent}"
                yield Finding(record.step, name, problem)


def _too_stale(record: StepRecord, groups: Sequence[Group], bound: int | None) -> Iterator[Finding]:
    """Trained calls with tokens of a policy older than the run allows, or younger than the step's own."""
    if bound is None:
        return
    used = {name for name, _ in record.rollouts}
    for member in (member for group in groups for member in group.trajectories if member.rollout.id in used):
        versions = [run.version for call in member.transitions for run in call.versions]
        if not all(record.step - bound <= version + 1 <= record.step for version in versions):
            found = f"sampled by versions {min(versions)} to {max(versions)}"
            problem = f"{found}, which is not within trainer.max_staleness = {bound} of step {record.step}"
            yield Finding(record.step, member.rollout.id, problem)


def _rounded(records: Sequence[StepRecord], epochs: Sequence[Epoch]) -> Iterator[str]:
    """Where the numeric context changes within an epoch, but for the path, which follows from the step's own rows; where the
    teacher does, though its name does not; and where stages of plugins do."""
    for before, record in itertools.pairwise(records):
        for of, others in other_stages(before.context, stages_of(record.context)).items():
            yield f"from step {record.step} on {of} were made with other stages than before: {others}"
        if epoch_at(epochs, before.step) is not epoch_at(epochs, record.step) or not (
            before.context and record.context
        ):
            continue
        old, new = before.context, record.context
        changed = [key for key in NUMERIC if key != "path" and old.get(key) != new.get(key)]
        if other := [f"{key} {old.get(key)} → {new.get(key)}" for key in changed]:
            yield f"from step {record.step} on sums are rounded otherwise than before: {', '.join(other)}"
        then, now = recorded_teacher(before), recorded_teacher(record)
        if then is not None and now is not None and then.digest != now.digest:
            change = f"SHA-256 {then.digest[:12]}... → {now.digest[:12]}..."
            yield f"from step {record.step} on the teacher {now.name} is another model than before: {change}"
