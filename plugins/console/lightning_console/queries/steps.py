"""One step of a run: its groups with what they earned, what training made of each rollout, and what failed.

The invariant: advantages are derived again from the store by the functions that training used, and only where they make the
very batch that was trained.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from lightning.algorithms.protocol import Batch
from lightning.batch import Group
from lightning.errors import ConfigError, LightningError
from lightning.store.protocol import Store
from lightning.trainer.epochs import Epoch, epoch_at, read_epochs
from lightning.trainer.metrics import REASONS
from lightning.trainer.plan import TRAIN
from lightning.trainer.reasons import reason
from lightning.trainer.replay import algorithm_of, batch_of, policy_fault_of, train_agents_of
from lightning.trainer.training_data import all_rollouts, load_groups, rollouts_of
from lightning.types import Json, Rollout, Run, Status, StepRecord
from lightning_debug.profile import why_untaught

from lightning_console.queries.memo import Memo, apart

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


_memo: Memo[Step] = Memo(kept=16)


async def read_step(store: Store, run: Run, step: int) -> Step:
    """A step of a run. Raises `ConfigError` for one that it does not have."""
    found = await store.steps(run.id, after=step - 1, limit=1)
    last = await store.last_step(run.id)
    record = found[0] if found and found[0].step == step else None
    if record is None:
        return await _open_step(store, run, step, last)
    stamp = (record.digest, last.step if last else None)

    async def make() -> Step:
        return await _read(store, run, record, last)

    return await _memo.get(store, (run.id, step), stamp, lambda: apart(make))


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


async def _read(store: Store, run: Run, record: StepRecord, last: StepRecord | None) -> Step:
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
    fault = policy_fault_of(epoch)
    return why_untaught(members, 0.0 if fault == "mask" else fault if isinstance(fault, float) else None)


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
