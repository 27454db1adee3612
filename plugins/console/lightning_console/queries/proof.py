"""What a step made of its rollouts: each call's advantage and weight, derived again as an audit does, and if that is proved.

The invariant: `proved` is true only where the rows that are derived now have the digest that the step recorded; everything else
says why not, and no model is asked for it.
"""

from __future__ import annotations

import asyncio
import json
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
from lightning.errors import DataError, LightningError
from lightning.store.protocol import PRUNED, Store
from lightning.trainer.epochs import Epoch, epoch_at, read_epochs
from lightning.trainer.own_loop import changed_by_loop
from lightning.trainer.replay import policy_fault_of, train_agents_of
from lightning.trainer.runs import rebuild_algorithm
from lightning.trainer.training_data import (
    is_batch_of,
    load_groups,
    recorded_values,
    rollout_digest,
    rollouts_of,
)
from lightning.types import Rollout, Run, StepRecord

from lightning_console.queries.memo import Memo

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


_memo: Memo[StepProof] = Memo(kept=16)


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
    return await _memo.get(store, about, stamp, lambda: _read(store, run, record, epoch))


async def _read(store: Store, run: Run, record: StepRecord, epoch: Epoch) -> StepProof:
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
