"""A step of a run, derived again: what training made of each of its rollouts and of each of their calls.

The invariant: advantages are derived again from the store by the functions that training used, as an audit does, and no model
is asked for it; they are told only where they make the very batch that was trained. `proved` is true only where the rows that
are derived now have the digest that the step recorded; everything else says why not.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from lightning.trainer.runs import rebuild_algorithm
from lightning.trainer.training_data import is_batch_of, load_groups, recorded_values, rollout_digest, rollouts_of
from lightning.types import Rollout, Run, StepRecord
from lightning_proof.bring_forward import policy_fault_of, train_agents_of

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
REMOVED: Final = "calls that the run was trained on were removed (lightning db prune --trained)"
ASKS: Final = "its credit function has rewards of its own (a judge), which is not asked for a page"


@dataclass(frozen=True, slots=True)
class CallCredit:
    """What training made of a call: the advantage and the weight of each of its `tokens`, as they are in the step's rows.
    `own` is what its step rewards (tools' included) add up to."""

    advantage: float
    weight: float
    tokens: int
    own: float = 0.0

    @property
    def push(self) -> float:
        """How hard each token's logprob is pushed, before a clip or a mask: advantage times weight."""
        return self.advantage * self.weight


@dataclass(frozen=True, slots=True)
class MemberCredit:
    """What training made of a rollout. `total` is its return: `reward`, what its calls and its tools earned, and what its
    length cost. `tokens` were sampled for it in `turns` calls. `recorded` says whether what is stored of it has the digest that
    the step recorded; None where it was not trained."""

    reward: float
    total: float
    calls: Mapping[int, CallCredit]
    tokens: int
    turns: int
    recorded: bool | None = None

    @property
    def advantage(self) -> float | None:
        """The mean over the tokens that have a weight; None where none has."""
        taught = [each for each in self.calls.values() if each.weight]
        tokens = sum(each.tokens for each in taught)
        return sum(each.advantage * each.tokens for each in taught) / tokens if tokens else None


@dataclass(frozen=True, slots=True)
class StepProof:
    """A step derived again. `record` is None where no step has looked at the rollouts. `proved` is whether the rows have the
    recorded digest; None where they could not be derived, and `why` says why not. `rollouts` are all that the step looked at,
    `members` those that count, by id; `groups` has mean and deviation of a group's returns, and how many they are. `skipped`
    says by group why it taught nothing."""

    record: StepRecord | None = None
    epoch: Epoch | None = None
    rollouts: tuple[Rollout, ...] = ()
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
    return await prove_step(store, run, record, epochs)


async def prove_step(store: Store, run: Run, record: StepRecord, epochs: Sequence[Epoch]) -> StepProof:
    """What a step made of the rollouts that it looked at, as it was derived within the last minute. Raises `StoreError`."""
    pruned = await store.get_state(run.id, PRUNED)
    stamp = record.digest, len(epochs), json.dumps(pruned, default=str), int(time.monotonic() // FRESH)
    about = run.id, run.created_at, record.step
    lost = isinstance(pruned, Mapping) and bool(pruned.get("trained"))
    epoch = epoch_at(epochs, record.step)
    return await _proofs.get(store, about, stamp, lambda: _prove(store, run, record, epoch, lost=lost))


async def _prove(store: Store, run: Run, record: StepRecord, epoch: Epoch, *, lost: bool) -> StepProof:
    """The step derived again from what the store holds now; calls that were trained may be `lost`."""
    rollouts = await rollouts_of(store, record, epoch.max_staleness or 0)
    known = StepProof(record, epoch, tuple(rollouts))
    groups: list[Group] = []
    algorithm, why = None, OWN_CODE
    try:
        groups = await load_groups(store, rollouts, train_agents_of(epoch), policy_fault_of(epoch))
        algorithm = rebuild_algorithm(epoch.config)
        if algorithm is not None and needs_critic(algorithm):
            groups = await recorded_values(store, run.id, record.step, groups)
    except LightningError as error:
        algorithm, why = None, str(error)
    if lost and not (groups and all(each.transitions for group in groups for each in group.trajectories)):
        return replace(known, why=REMOVED)
    return await asyncio.to_thread(_derived, known, record, groups, algorithm, why)


def _derived(
    known: StepProof, record: StepRecord, groups: Sequence[Group], algorithm: Algorithm | None, why: str
) -> StepProof:
    """The step with its credit. `why` says why there is no algorithm, where there is none."""
    digests = {name: digest for (name, _), digest in zip(record.rollouts, record.digests, strict=False)}
    batch, proved = None, None
    if algorithm is not None and getattr(getattr(algorithm, "credit", None), "rewards", False):
        why = ASKS
    elif algorithm is not None:
        try:
            batch = algorithm.batch(groups)
            why = _doubt(record, batch)
            proved = not why
        except Exception as error:  # noqa: BLE001 — isolates algorithms and credit functions of others
            why = f"its batch cannot be derived again: {type(error).__name__}: {error}"
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
            own = _calls(with_all, given.get(member.rollout.id, {}))
            calls = (*member.transitions, *member.refused, *member.lost)
            tokens = sum(len(call.response_ids) for call in calls)
            members[member.rollout.id] = MemberCredit(member.reward, total, own, tokens, len(calls), same)
    skipped = {} if batch is None or algorithm is None else _skipped(groups, batch, algorithm)
    return StepProof(record, known.epoch, known.rollouts, algorithm, proved, why, members, spreads, skipped)


def _doubt(record: StepRecord, batch: Batch) -> str:
    """Why a derived batch does not prove what a step computed on; empty where it does."""
    used = tuple((rollout.id, rollout.attempt) for rollout in batch.used)
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
            advantage, weight = float(sample.advantages[span.start]), float(sample.weights[span.start])
            found[call.seq] = CallCredit(advantage, weight, span.stop - span.start, float(own))
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
