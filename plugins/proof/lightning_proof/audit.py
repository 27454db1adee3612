"""Derive every trained batch of a run again from its store, and find where it differs from the one that was trained.

The invariant: a clean audit means that the engine computed each step on exactly the stored token ids, logprobs, rewards,
versions, policies and order; any single change to them is found and named. The same holds for weights and advantages, except in
steps that the report lists as changed by a loop of the user's own (`Trainer.session`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lightning.algorithms.protocol import Algorithm, head_of
from lightning.batch import Group, begins_at
from lightning.errors import ConfigError, DataError, StoreError
from lightning.store.protocol import PRUNED, Store
from lightning.store.rollout_state import Reuse, reuse_of
from lightning.trainer.context import NUMERIC, Epoch, epoch_at, other_stages, read_epochs, stages_of
from lightning.trainer.model import policy_set_of
from lightning.trainer.plan import TRAIN
from lightning.trainer.runs import rebuild_algorithm
from lightning.trainer.training_data import agents_of_step, all_rollouts, load_groups, rollout_digest
from lightning.types import POLICY, Rollout, StepRecord

from lightning_proof.bring_forward import recorded_teacher
from lightning_proof.recorded_step import is_batch_of, own_step, recorded_values


@dataclass(frozen=True, slots=True)
class Finding:
    """One difference from the trained data. `rollout` is the id of a rollout or a group; empty if it concerns the whole
    step."""

    step: int
    rollout: str
    problem: str


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The result of an audit, with the amount of data that was checked. `rederived` is False if only the user's own code can
    make an algorithm of the run again, so that recorded data were compared, but not advantages. `warnings` name steps that were
    computed with other numerics than the steps before them in the same config epoch, so that they can be taken again only up to
    rounding, and calls, attempts or steps that were made with other stages. `rollouts` counts each rollout once; `reused`
    counts how often a step trained one again and declared that (a replay buffer), which `calls` and `tokens` include.
    `changed` are the steps of a loop of the user's own (`Trainer.session`) that were computed on other rows than the algorithm
    made: on some of them, or with other weights or advantages."""

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
        """Whether the audit has no findings."""
        return not self.findings


async def audit(store: Store, run: str, algorithm: Algorithm | None = None) -> AuditReport:
    """Audit a run, each step with the algorithm and the settings of its config epoch. `algorithm` is used for epochs whose
    algorithm cannot be made again from its stored arguments.

    Raises `StoreError` if there is no such run, or if calls that it was trained on were removed.
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
    """Yield each step with the rollouts of its groups."""
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
    """Return the findings about a step, and the amount of data that was checked: `rollouts`, `calls`, `tokens` and `reused`."""
    try:
        groups = await load_groups(store, members, agents_of_step(epoch, record), epoch.policy_fault)
        if algorithm is not None and head_of(algorithm):
            groups = await recorded_values(store, record.run, record.step, groups)
        several = policy_set_of(epoch.config)
    except (StoreError, ConfigError) as error:
        return [Finding(record.step, "", f"cannot be read: {error}")], {}
    policies, untrained = ([*several.adapters], several.untrained) if several is not None else ([POLICY], ())
    findings = [
        *_compare(record, epoch, members, groups, algorithm, reused),
        *_no_branches(record, groups),
        *_too_stale(record, groups, epoch.max_staleness, untrained),
        *(() if epoch.config.get("recorded") else _of_other_policies(record, groups, policies, untrained)),
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
            yield Finding(
                record.step, name, "its stored ids, logprobs, reward, versions or policies are not the trained ones"
            )
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
    """Return the steps that a loop of the user's own computed on other rows than the batch's, and a finding for each step whose
    updates cannot be read from the record, or do not have the recorded digest."""
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
    """Return the rollouts that each step declares as reused, by step, and a finding for each declaration that cannot be
    read."""
    found, findings = {}, []
    for record in records:
        try:
            found[record.step] = reuse_of(record)
        except DataError as error:
            found[record.step] = Reuse()
            findings.append(Finding(record.step, "", str(error)))
    return found, findings


def _not_reusable(record: StepRecord, rollout: Rollout) -> str:
    """Return the reason why a step cannot have reused a rollout: it was sampled for a later step, or no earlier step is marked
    as having trained it; empty if it can."""
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
    """Yield findings about rollouts that more steps trained, and groups that more steps took, than the run allows or the steps
    declare."""
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
    """Return the problem with a rollout that a step trained after the steps `before`; empty if there is none."""
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
    """Yield findings about branches whose records do not show that they branched. A branch must have a call with the prompt of
    its parent's branching call, token for token."""
    for group in groups:
        for member in group.trajectories:
            if member.rollout.parent is None:
                continue
            name = member.rollout.id
            at = next((call for call in member.parent_calls if call.key == member.rollout.parent), None)
            if at is None:
                problem = f"branches at a call that the store does not have (any more): {member.rollout.parent}"
                yield Finding(record.step, name, problem)
            elif not begins_at(member.transitions, at):
                problem = f"has no call with the prompt of that at which it branches, {member.rollout.parent}"
                yield Finding(record.step, name, problem)


def _too_stale(
    record: StepRecord, groups: Sequence[Group], bound: int | None, untrained: Collection[str]
) -> Iterator[Finding]:
    """Yield findings about trained rollouts with tokens of a policy version that is older than the run allows, or newer than
    the one that the step trained. The `untrained` policies have one version."""
    if bound is None:
        return
    used = {name for name, _ in record.rollouts}
    for member in (member for group in groups for member in group.trajectories if member.rollout.id in used):
        versions = [run.version for call in member.transitions for run in call.versions if run.policy not in untrained]
        if not all(record.step - bound <= version + 1 <= record.step for version in versions):
            found = f"sampled by versions {min(versions)} to {max(versions)}"
            problem = f"{found}, which is not within trainer.max_staleness = {bound} of step {record.step}"
            yield Finding(record.step, member.rollout.id, problem)


def _of_other_policies(
    record: StepRecord, groups: Sequence[Group], policies: Collection[str], untrained: Collection[str]
) -> Iterator[Finding]:
    """Yield findings about trained rollouts with a call of a policy that the run does not have, or with one of an `untrained`
    policy that is said to have been updated. `policies` are the trained ones."""
    used = {name for name, _ in record.rollouts}
    for member in (member for group in groups for member in group.trajectories if member.rollout.id in used):
        calls = [(call.caller.name, run) for call in member.transitions for run in call.versions]
        for agent, run in calls:
            if run.policy in untrained and run.version:
                problem = f"its version {run.version} of {run.policy!r} cannot be: this policy is never trained"
                yield Finding(record.step, member.rollout.id, f"a call of {agent}: {problem}")
            elif run.policy not in policies and run.policy not in untrained:
                known = ", ".join([*policies, *untrained])
                problem = f"answered by the policy {run.policy!r}, which the run does not have (it has {known})"
                yield Finding(record.step, member.rollout.id, f"a call of {agent} is {problem}")


def _rounded(records: Sequence[StepRecord], epochs: Sequence[Epoch]) -> Iterator[str]:
    """Yield warnings about steps where the stages of plugins change, where the numeric context changes within an epoch (except
    for `path`, which follows from the step's rows), and where the teacher is another model than before."""
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
