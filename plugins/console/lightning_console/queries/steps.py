"""One step of a run: its groups with what they earned, what training made of each rollout and call, and what failed.

The invariant: advantages are derived again from the store by the functions that training used, as an audit does, and no model
is asked for it; they are told only where they make the very batch that was trained. `proved` is true only where the rows that
are derived now have the digest that the step recorded; everything else says why not.
"""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from lightning.algorithms.intake import Overlong, with_rules
from lightning.algorithms.protocol import Algorithm, Batch, needs_critic
from lightning.batch import Group, Sample, TokenSpan, Trajectory
from lightning.credit import call_rewards
from lightning.credit.protocol import rollout_return
from lightning.errors import ConfigError, DataError, LightningError
from lightning.store.protocol import PRUNED, Store
from lightning.trainer.epochs import Epoch, epoch_at, read_epochs
from lightning.trainer.metrics import REASONS
from lightning.trainer.own_loop import changed_by_loop
from lightning.trainer.plan import TRAIN
from lightning.trainer.reasons import reason
from lightning.trainer.replay import algorithm_of, batch_of, policy_fault_of, train_agents_of
from lightning.trainer.runs import rebuild_algorithm
from lightning.trainer.training_data import (
    all_rollouts,
    is_batch_of,
    load_groups,
    recorded_values,
    rollout_digest,
    rollouts_of,
)
from lightning.types import Json, Rollout, Run, Status, StepRecord
from lightning_debug.profile import why_untaught

from lightning_console.queries.memo import Memo, apart

OWN_CODE: Final = (
    "only the user's own code can make its algorithm again, so that advantages are not derived here: "
    "`lightning audit` proves what was recorded"
)
FRESH: Final = 60.0
"""Seconds for which a step is not derived again, or 20 times what deriving it took, where that is more."""
UNTRAINED: Final = {
    "train": "no training step has looked at it",
    "branch": "branches that were made by a command are not trained on",
}
"""Why a rollout was not trained, by its split."""
CHANGED: Final = "the run's own loop trained on changed rows: with other weights or advantages, or on some of them"
ASKS: Final = "its credit function has rewards of its own (a judge), which is not asked for a page"


@dataclass(frozen=True, slots=True)
class CallCredit:
    """What training made of a call: the advantage and the weight of each of its tokens, as they are in the step's rows.
    `own` is what its step rewards (tools' included) add up to."""

    advantage: float
    weight: float
    own: float = 0.0

    @property
    def push(self) -> float:
        """How hard each token's logprob is pushed, before a clip or a mask: advantage times weight."""
        return self.advantage * self.weight


@dataclass(frozen=True, slots=True)
class MemberCredit:
    """What training made of a rollout. `total` is its return: `reward`, what its calls and its tools earned, and what its
    length cost. `recorded` says whether what is stored of it has the digest that the step recorded; None where it was not
    trained."""

    reward: float
    total: float
    calls: Mapping[int, CallCredit]
    recorded: bool | None = None


@dataclass(frozen=True, slots=True)
class StepProof:
    """A step derived again. `record` is None where no step has looked at the rollouts. `proved` is whether the rows have the
    recorded digest; None where they could not be derived, and `why` says why not. `members` are its rollouts by id; `mean` and
    `deviation` those of the returns of a group. `skipped` says by group why it taught nothing."""

    record: StepRecord | None = None
    epoch: Epoch | None = None
    algorithm: Algorithm | None = None
    proved: bool | None = None
    why: str = ""
    members: Mapping[str, MemberCredit] = field(default_factory=dict)
    groups: Mapping[str, tuple[float, float, int]] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)


_proofs: Memo[StepProof] = Memo(kept=16)


async def record_of(store: Store, rollout: Rollout, epochs: Sequence[Epoch]) -> StepRecord | None:
    """The committed step that looked at a rollout's group; None where none has."""
    if rollout.trained_at_step is not None:
        found = await store.steps(rollout.run, after=rollout.trained_at_step - 1, limit=1)
        return found[0] if found and found[0].step == rollout.trained_at_step else None
    most = max((epoch.max_staleness or 0 for epoch in epochs), default=0)
    for record in await store.steps(rollout.run, after=rollout.step - 1, limit=most + 1):
        if rollout.group in record.groups:
            return record
    return None


async def prove(store: Store, run: Run, rollout: Rollout) -> StepProof:
    """What the step that looked at a rollout made of it and its siblings, as it was derived within the last minute.

    Raises `StoreError` for rows that cannot be read.
    """
    epochs = await read_epochs(store, run)
    record = await record_of(store, rollout, epochs)
    if record is None:
        said = UNTRAINED.get(rollout.split, "held-out rollouts are never trained on")
        return StepProof(why=said)
    epoch = epoch_at(epochs, record.step)
    pruned = await store.get_state(run.id, PRUNED)
    if isinstance(pruned, Mapping) and pruned.get("trained"):
        return StepProof(
            record, epoch, why="calls that the run was trained on were removed (lightning db prune --trained)"
        )
    stamp = record.digest, len(epochs), json.dumps(pruned, default=str), int(time.monotonic() // FRESH)
    about = run.id, run.created_at, record.step
    return await _proofs.get(store, about, stamp, lambda: _prove(store, run, record, epoch))


async def _prove(store: Store, run: Run, record: StepRecord, epoch: Epoch) -> StepProof:
    """The step derived again from what the store holds now."""
    members = await rollouts_of(store, record, epoch.max_staleness or 0)
    try:
        groups = await load_groups(store, members, train_agents_of(epoch), policy_fault_of(epoch))
        algorithm = rebuild_algorithm(epoch.config)
        if algorithm is not None and needs_critic(algorithm):
            groups = await recorded_values(store, run.id, record.step, groups)
    except LightningError as error:
        return StepProof(record, epoch, why=str(error))
    return await asyncio.to_thread(_derived, record, epoch, groups, algorithm)


def _derived(record: StepRecord, epoch: Epoch, groups: Sequence[Group], algorithm: Algorithm | None) -> StepProof:
    digests = {name: digest for (name, _), digest in zip(record.rollouts, record.digests, strict=False)}
    batch, why, proved = None, "", None
    if algorithm is None:
        why = OWN_CODE
    elif getattr(getattr(algorithm, "credit", None), "rewards", False):
        why = ASKS
    else:
        try:
            batch = algorithm.batch(groups)
        except Exception as error:  # noqa: BLE001 — isolates algorithms and credit functions of others
            why = f"its batch cannot be derived again: {type(error).__name__}: {error}"
    if batch is not None:
        used = tuple((rollout.id, rollout.attempt) for rollout in batch.used)
        why = _doubt(record, batch, used)
        proved = not why
    rewarded = [_rewarded(group, algorithm) for group in groups]
    given = _credits(batch.samples if batch else ())
    members, spreads = {}, {}
    for group, counted in zip(groups, rewarded, strict=True):
        returns = [rollout_return(member) for member in counted.trajectories]
        if returns:
            spreads[group.id] = (float(np.mean(returns)), float(np.std(returns)), len(returns))
        for member, with_all, total in zip(group.trajectories, counted.trajectories, returns, strict=True):
            digest = digests.get(member.rollout.id)
            same = None if digest is None else rollout_digest(member) == digest
            members[member.rollout.id] = MemberCredit(
                member.reward, total, _calls(with_all, given.get(member.rollout.id, {})), same
            )
    skipped = {} if batch is None or algorithm is None else _skipped(groups, batch, algorithm)
    return StepProof(record, epoch, algorithm, proved, why, members, spreads, skipped)


def _doubt(record: StepRecord, batch: Batch, used: Sequence[tuple[str, int]]) -> str:
    """Why a derived batch does not prove what a step computed on; empty where it does."""
    try:
        if used == record.rollouts and is_batch_of(record, batch):
            return CHANGED if changed_by_loop(record) else ""
    except DataError as error:
        return str(error)
    return "the rows that are derived now are not those that the step recorded: run `lightning audit`"


def _rewarded(group: Group, algorithm: Algorithm | None) -> Group:
    """The group with all that its algorithm counts as reward."""
    tokens = getattr(algorithm, "overlong_tokens", None)
    overlong = None
    if tokens is not None:
        overlong = Overlong(
            tokens, getattr(algorithm, "overlong_buffer", 0), getattr(algorithm, "overlong_penalty", 1.0)
        )
    return with_rules(group, getattr(algorithm, "tool_reward", None), overlong)


def _credits(samples: Sequence[Sample]) -> dict[str, dict[int, tuple[Sample, TokenSpan]]]:
    found: dict[str, dict[int, tuple[Sample, TokenSpan]]] = {}
    for sample in samples:
        for span in sample.spans:
            found.setdefault(span.rollout, {})[span.seq] = sample, span
    return found


def _calls(member: Trajectory, spans: Mapping[int, tuple[Sample, TokenSpan]]) -> dict[int, CallCredit]:
    found = {}
    for call, own in zip(member.transitions, call_rewards(member), strict=True):
        if call.seq in spans:
            sample, span = spans[call.seq]
            found[call.seq] = CallCredit(
                float(sample.advantages[span.start]), float(sample.weights[span.start]), float(own)
            )
    return found


def _skipped(groups: Sequence[Group], batch: Batch, algorithm: Algorithm) -> dict[str, str]:
    """Why groups have no row in the batch. Each is asked about alone, since a batch only counts them."""
    taught = {rollout.group for rollout in batch.used}
    found = {}
    for group in groups:
        if group.id not in taught:
            try:
                alone = algorithm.batch([group])
            except Exception:  # noqa: BLE001 — isolates algorithms of others; the reason is only a word beside a fact
                found[group.id] = "it has no row in the step's batch"
                continue
            reasons = [*alone.skipped, *alone.dropped]
            found[group.id] = ", ".join(reasons) or "every advantage in it is 0"
    return found


EXAMPLES: Final = 5
"""Rollouts that are named for each reason of failing."""


@dataclass(frozen=True, slots=True)
class RolloutPoint:
    """One rollout of a step. `tokens` are those that were sampled, `turns` its calls; both are None where its calls are not in
    the store. `advantage` is the mean over its trained tokens, None where it was not trained or that cannot be derived."""

    rollout: str
    group: str
    status: Status
    reward: float | None
    tokens: int | None
    turns: int | None
    advantage: float | None
    seconds: float
    why: str = ""


@dataclass(frozen=True, slots=True)
class GroupLine:
    """A group of a step: its task, and the rewards and states of its rollouts in order, the last `branches` of which are
    branches of others. `untaught` is the reason why it taught nothing, in the trainer's word, and `why` in plain ones; both are
    empty where it taught."""

    group: str
    task: Json
    task_id: str
    rewards: tuple[float | None, ...]
    states: tuple[Status, ...]
    mean: float | None
    spread: float | None
    failed: int
    step: int
    untaught: str = ""
    why: str = ""
    branches: int = 0


@dataclass(frozen=True, slots=True)
class Failure:
    """Rollouts that failed for one reason. `fault` says whose it was."""

    count: int
    why: str
    fault: str
    rollouts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One step. `committed` is False for the one that is being sampled. `unknown` says why advantages are not known, `unread`
    why calls are not; both are empty where they are."""

    run: str
    step: int
    committed: bool
    at: float | None
    policy_version: int | None
    metrics: Mapping[str, float]
    groups: tuple[GroupLine, ...]
    rollouts: tuple[RolloutPoint, ...]
    failures: tuple[Failure, ...]
    last: int | None
    epoch: int
    unknown: str = ""
    unread: str = ""


_steps: Memo[Step] = Memo(kept=16)


async def read_step(store: Store, run: Run, step: int) -> Step:
    """A step of a run. Raises `ConfigError` for one that it does not have."""
    found = await store.steps(run.id, after=step - 1, limit=1)
    last = await store.last_step(run.id)
    record = found[0] if found and found[0].step == step else None
    if record is None:
        return await _open_step(store, run, step, last)
    stamp = (record.digest, last.step if last else None)

    async def make() -> Step:
        return await _read_step(store, run, record, last)

    return await _steps.get(store, (run.id, step), stamp, lambda: apart(make))


async def _open_step(store: Store, run: Run, step: int, last: StepRecord | None) -> Step:
    """A step that is not committed: what was sampled of it up to now."""
    rollouts = await all_rollouts(store, run.id, split=TRAIN, step=step) if step >= 0 else []
    if not rollouts:
        has = f"has the steps 0 to {last.step}" if last else "has no step yet"
        raise ConfigError(f"there is no step {step}: the run {run.id} {has}")
    groups = [_line(own, "") for own in _members(rollouts)]
    points = [_point(rollout, None, None) for rollout in rollouts]
    unknown = "the step is not committed: nothing was trained yet"
    return Step(
        run.id, step, False, None, None, {}, tuple(groups), tuple(points), _failures(rollouts),
        last.step if last else None, 0, unknown, "",
    )  # fmt: skip


async def _read_step(store: Store, run: Run, record: StepRecord, last: StepRecord | None) -> Step:
    epochs = await read_epochs(store, run)
    epoch = epoch_at(epochs, record.step)
    rollouts = await rollouts_of(store, record, epoch.max_staleness or 0)
    groups = await load_groups(store, rollouts, train_agents_of(epoch), policy_fault_of(epoch))
    of_group = {group.id: group for group in groups}
    made = {member.rollout.id: member for group in groups for member in group.trajectories}
    batch, unknown = await _batch(store, record, epoch)
    advantages = _advantages(batch) if batch else {}
    trained = {rollout for rollout, _ in record.rollouts}
    points = []
    for rollout in rollouts:
        member = made.get(rollout.id)
        calls = (*member.transitions, *member.refused, *member.lost) if member else ()
        sizes = (sum(len(call.response_ids) for call in calls), len(calls)) if calls else None
        points.append(_point(rollout, sizes, advantages.get(rollout.id)))
    lines = []
    for own in _members(rollouts):
        taught = any(rollout.id in trained for rollout in own)
        untaught = "" if taught else _untaught(epoch, of_group.get(own[0].group), own)
        lines.append(_line(own, untaught))
    scored = any(rollout.status is Status.SUCCEEDED for rollout in rollouts)
    unread = "its calls were removed (lightning db prune)" if scored and not any(p.turns for p in points) else ""
    return Step(
        run=run.id,
        step=record.step,
        committed=True,
        at=record.at,
        policy_version=record.policy_version,
        metrics=record.metrics,
        groups=tuple(lines),
        rollouts=tuple(points),
        failures=_failures(rollouts),
        last=last.step if last else record.step,
        epoch=epoch.number,
        unknown=unread or unknown,
        unread=unread,
    )


async def _batch(store: Store, record: StepRecord, epoch: Epoch) -> tuple[Batch | None, str]:
    """The step's batch, made again and compared with what was trained; or why that cannot be."""
    try:
        return await batch_of(store, record, epoch, algorithm_of(epoch, ())), ""
    except LightningError as error:
        return None, str(error)
    except Exception as error:  # noqa: BLE001 — isolates algorithms and credit functions of others
        return None, f"{type(error).__name__}: {error}"


def _advantages(batch: Batch) -> dict[str, float]:
    """The mean advantage of each rollout's trained tokens."""
    found: dict[str, list[float]] = {}
    for sample in batch.samples:
        for span in sample.spans:
            taught = sample.weights[span.start : span.stop] != 0
            if np.any(taught):
                found.setdefault(span.rollout, []).extend(sample.advantages[span.start : span.stop][taught].tolist())
    return {rollout: float(np.mean(values)) for rollout, values in found.items()}


def _untaught(epoch: Epoch, group: Group | None, members: Sequence[Rollout]) -> str:
    """Why a group taught nothing: what its algorithm says of it alone; where that cannot be made again, what rewards say."""
    if group is not None:
        try:
            skipped = algorithm_of(epoch, ()).batch([group]).skipped
        except Exception:  # noqa: BLE001 — isolates algorithms of others; the rewards tell as well
            skipped = {}
        if skipped:
            return next(iter(skipped))
    return why_untaught(members, policy_fault_of(epoch))


def _members(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout)
    return list(groups.values())


def _line(members: Sequence[Rollout], untaught: str) -> GroupLine:
    members = sorted(members, key=lambda rollout: rollout.parent is not None)
    rewards = [rollout.reward for rollout in members if rollout.reward is not None]
    first = members[0]
    return GroupLine(
        group=first.group,
        task=first.task.input,
        task_id=first.task.id,
        rewards=tuple(rollout.reward for rollout in members),
        states=tuple(rollout.status for rollout in members),
        mean=statistics.fmean(rewards) if rewards else None,
        spread=statistics.pstdev(rewards) if len(rewards) > 1 else None,
        failed=sum(rollout.status is Status.FAILED for rollout in members),
        step=first.step,
        untaught=untaught,
        why=REASONS.get(untaught, "rewards do not tell why" if untaught == "other" else untaught),
        branches=sum(rollout.parent is not None for rollout in members),
    )


def _point(rollout: Rollout, sizes: tuple[int, int] | None, advantage: float | None) -> RolloutPoint:
    return RolloutPoint(
        rollout=rollout.id,
        group=rollout.group,
        status=rollout.status,
        reward=rollout.reward,
        tokens=sizes[0] if sizes else None,
        turns=sizes[1] if sizes else None,
        advantage=advantage,
        seconds=rollout.seconds,
        why=str(reason(rollout.error)) if rollout.status is Status.FAILED else "",
    )


def _failures(rollouts: Sequence[Rollout]) -> tuple[Failure, ...]:
    """Rollouts that failed, by whose fault it was and why, the commonest first. Numbers make no other reason."""
    found: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for one in rollouts:
        if one.status is Status.FAILED:
            why = str(reason(one.error))
            key = (one.fault.value if one.fault else "", re.sub(r"\d+", "N", why))
            found.setdefault(key, []).append((one.id, why))
    failures = [
        Failure(len(own), own[0][1], fault, tuple(rollout for rollout, _ in own[:EXAMPLES]))
        for (fault, _), own in found.items()
    ]
    return tuple(sorted(failures, key=lambda each: -each.count))
