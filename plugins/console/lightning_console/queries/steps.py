"""Derive a step of a run again: the advantage and weight of each call of each of its rollouts.

The invariant: advantages are derived from the store by the functions that training used, as an audit does, without a model.
`proved` is true only if the derived rows have the digest that the step recorded; otherwise `why` says why they do not.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from lightning.algorithms.protocol import Algorithm, Batch, head_of
from lightning.batch import FloatArray, Group, Sample, TokenSpan, Trajectory
from lightning.credit import call_rewards
from lightning.credit.protocol import rollout_return
from lightning.errors import DataError, LightningError
from lightning.store.protocol import PRUNED, Store
from lightning.trainer.context import Epoch, epoch_at, read_epochs
from lightning.trainer.runs import rebuild_algorithm
from lightning.trainer.training_data import agents_of_step, load_groups, rollout_digest
from lightning.types import Rollout, Run, StepRecord
from lightning_debug.credit_choice import rewarded
from lightning_debug.rollout_calls import HELD_OUT, NOT_LOOKED_AT, steps_of
from lightning_debug.rules import last_line
from lightning_proof.recorded_step import is_batch_of, own_step, recorded_values, rollouts_of

from lightning_console.queries.memo import Memo

OWN_CODE: Final = (
    "only the user's own code can make its algorithm again, so that advantages are not derived here: "
    "`lightning audit` proves what was recorded"
)
FRESH: Final = 60.0
"""Seconds for which a derived step is kept, or 20 times the time that deriving it took if that is more."""
CHANGED: Final = "the run's own loop trained on changed rows: with other weights or advantages, or on some of them"
REMOVED: Final = "calls that the run was trained on were removed (lightning db prune --trained)"
ASKS: Final = "its credit function has rewards of its own (a judge), which is not asked for a page"


@dataclass(frozen=True, slots=True)
class CallCredit:
    """The credit of a call in training: the advantage and the weight that each of its `tokens` has in the step's rows. `own`
    is the sum of the call's step rewards, those of tools included. Where the tokens of the call differ, `advantages` and
    `pushes` have those of each, `advantage` is their mean, and `weight` the first's; else the two are empty."""

    advantage: float
    weight: float
    tokens: int
    own: float = 0.0
    pushes: tuple[float, ...] = ()
    advantages: tuple[float, ...] = ()

    @property
    def push(self) -> float:
        """How hard each token's logprob is pushed, before a clip or a mask: advantage times weight."""
        return self.advantage * self.weight

    @property
    def whole(self) -> float:
        """The pushes of all tokens of the call together."""
        return sum(self.pushes) if self.pushes else self.push * self.tokens


@dataclass(frozen=True, slots=True)
class MemberCredit:
    """The credit of a rollout in training, with that of its `calls`, by sequence number. `total` is its return: `reward` plus
    step rewards and tool rewards, less the penalty for its length. `tokens` were sampled for it in `turns` calls; `cut_off`
    of these ended at the limit of tokens, and `tool_errors` has tool and error of each failed tool run. `recorded` says whether
    the stored rollout has the digest that the step recorded; None if it was not trained on."""

    reward: float
    total: float
    calls: Mapping[int, CallCredit]
    tokens: int
    turns: int
    recorded: bool | None = None
    cut_off: int = 0
    tool_errors: tuple[str, ...] = ()

    @property
    def advantage(self) -> float | None:
        """The mean advantage over the tokens with a weight; None if there is none."""
        taught = [each for each in self.calls.values() if each.weight]
        tokens = sum(each.tokens for each in taught)
        return sum(each.advantage * each.tokens for each in taught) / tokens if tokens else None


@dataclass(frozen=True, slots=True)
class StepProof:
    """A step derived again. `record` is None if no step has used the rollouts. `proved` says whether the rows have the recorded
    digest; None if they could not be derived. `why` says why they are not proved. `rollouts` are all rollouts that the step
    looked at, `members` the credit of those in its groups, by id. `groups` has, by group, mean, deviation and number of the
    returns; `skipped` says why a group was not trained on. `steps` are all steps that looked at the rollout that was asked for,
    with their settings: this one and those that reused it."""

    record: StepRecord | None = None
    epoch: Epoch | None = None
    rollouts: tuple[Rollout, ...] = ()
    algorithm: Algorithm | None = None
    proved: bool | None = None
    why: str = ""
    members: Mapping[str, MemberCredit] = field(default_factory=dict)
    groups: Mapping[str, tuple[float, float, int]] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    steps: tuple[tuple[StepRecord, Epoch], ...] = ()


_proofs: Memo[StepProof] = Memo(kept=16)


async def prove(store: Store, run: Run, rollout: Rollout) -> StepProof:
    """Derive the first step that used a rollout, and so the credit of it and its siblings. A result is kept for about a minute.

    Raises `StoreError` for rows that cannot be read.
    """
    epochs = await read_epochs(store, run)
    steps = await steps_of(store, rollout, epochs)
    if not steps:
        return StepProof(why=NOT_LOOKED_AT.get(rollout.split, HELD_OUT))
    first = next((record for record, _ in steps if record.step == rollout.trained_at_step), steps[0][0])
    return replace(await prove_step(store, run, first, epochs), steps=tuple(steps))


async def prove_step(store: Store, run: Run, record: StepRecord, epochs: Sequence[Epoch]) -> StepProof:
    """Derive the credit of the rollouts that a step used. A result is kept for about a minute. Raises `StoreError`."""
    pruned = await store.get_state(run.id, PRUNED)
    stamp = record.digest, len(epochs), json.dumps(pruned, default=str), int(time.monotonic() // FRESH)
    about = run.id, run.created_at, record.step
    lost = isinstance(pruned, Mapping) and bool(pruned.get("trained"))
    epoch = epoch_at(epochs, record.step)
    return await _proofs.get(store, about, stamp, lambda: _prove(store, run, record, epoch, lost=lost))


async def _prove(store: Store, run: Run, record: StepRecord, epoch: Epoch, *, lost: bool) -> StepProof:
    """Derive a step from what the store holds now. `lost` says that trained calls of the run were removed."""
    rollouts = await rollouts_of(store, record, epoch.max_staleness or 0)
    known = StepProof(record, epoch, tuple(rollouts))
    groups: list[Group] = []
    algorithm, why = None, OWN_CODE
    try:
        groups = await load_groups(store, rollouts, agents_of_step(epoch, record), epoch.policy_fault)
        algorithm = rebuild_algorithm(epoch.config)
        if algorithm is not None and head_of(algorithm):
            groups = await recorded_values(store, run.id, record.step, groups)
    except LightningError as error:
        algorithm, why = None, str(error)
    if lost and not (groups and all(each.transitions for group in groups for each in group.trajectories)):
        return replace(known, why=REMOVED)
    return await asyncio.to_thread(_derived, known, record, groups, algorithm, why)


def _derived(
    known: StepProof, record: StepRecord, groups: Sequence[Group], algorithm: Algorithm | None, why: str
) -> StepProof:
    """Return the step with the credit of its rollouts. `why` is the reason if there is no `algorithm`."""
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
    with_rules = [rewarded(group, algorithm) for group in groups]
    given = _credits(batch.samples if batch else ())
    members, spreads = {}, {}
    for group, counted in zip(groups, with_rules, strict=True):
        returns = [rollout_return(member) for member in counted.trajectories]
        if returns:
            spreads[group.id] = (float(np.mean(returns)), float(np.std(returns)), len(returns))
        for member, with_all, total in zip(group.trajectories, counted.trajectories, returns, strict=True):
            digest = digests.get(member.rollout.id)
            same = None if digest is None else rollout_digest(member) == digest
            own = _calls(with_all, given.get(member.rollout.id, {}))
            calls = (*member.transitions, *member.refused, *member.lost)
            tokens = sum(len(call.response_ids) for call in calls)
            cut = sum(call.finish_reason == "length" for call in calls)
            failed = tuple(
                f"{event.name}: {last_line(event.error)}" for event in member.tool_events if event.status == "error"
            )
            known_of = MemberCredit(member.reward, total, own, tokens, len(calls), same, cut, failed)
            members[member.rollout.id] = known_of
    skipped = {} if batch is None or algorithm is None else _skipped(groups, batch, algorithm)
    return StepProof(record, known.epoch, known.rollouts, algorithm, proved, why, members, spreads, skipped)


def _doubt(record: StepRecord, batch: Batch) -> str:
    """Say why a derived batch is not proved to be the one that the step trained on; empty if it is."""
    used = tuple((rollout.id, rollout.attempt) for rollout in batch.used)
    try:
        if used == record.rollouts and is_batch_of(record, batch):
            own = own_step(record.context)
            return CHANGED if own is not None and own.changed else ""
    except DataError as error:
        return str(error)
    return "the rows that are derived now are not those that the step recorded: run `lightning audit`"


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
            place = slice(span.start, span.stop)
            advantages = np.where(sample.weights, sample.advantages, 0.0)[place]
            each, pushes = _uneven(advantages), _uneven(advantages * sample.weights[place])
            mean = float(np.mean(each)) if each else float(advantages[0])
            weight = float(sample.weights[span.start])
            found[call.seq] = CallCredit(mean, weight, len(advantages), float(own), pushes, each)
    return found


def _uneven(values: FloatArray) -> tuple[float, ...]:
    """Return the values of a call's tokens; nothing if they are all alike."""
    return tuple(map(float, values)) if np.ptp(values) > 1e-6 * np.abs(values).max() else ()


def _skipped(groups: Sequence[Group], batch: Batch, algorithm: Algorithm) -> dict[str, str]:
    """Say, by group, why groups have no row in the batch. A batch only counts the reasons, so each group is batched alone."""
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
