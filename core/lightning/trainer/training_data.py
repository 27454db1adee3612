"""From the store to groups and back to a proof: what a step trains on, and the record of what it did train on.

The invariant: training and audit read the same rows by the same functions, so a batch can be derived again at any time. The
head's values that a step was credited with are in the store before it is committed: a replay and an audit read those instead
of asking a head that has learned since.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from operator import attrgetter

import numpy as np

from lightning.algorithms.protocol import Batch
from lightning.batch.build import state_rows, with_values
from lightning.batch.masks import mask_of
from lightning.batch.sample import FloatArray, Sample, transition_digest
from lightning.batch.trajectory import Group, Trajectory
from lightning.losses.correction import Correction
from lightning.losses.custom_loss import GivenLoss
from lightning.losses.protocol import name_of, needs_top_logprobs
from lightning.store.pages import each_rollout
from lightning.store.protocol import Store
from lightning.trainer.context import RESTING, Epoch, PolicyFault
from lightning.trainer.runs import code_digest
from lightning.types import POLICY, Caller, CallStatus, Fault, Json, Rollout, Status, StepRecord, Transition, by_key


async def fresh_values(
    store: Store,
    run: str,
    step: int,
    groups: Sequence[Group],
    values: Callable[[Sequence[Sample]], list[FloatArray]],
) -> list[Group]:
    """The groups with the head's present values, which are recorded first; `values` is the engine's."""
    rows = state_rows(groups)
    given = await asyncio.to_thread(values, rows) if rows else []
    found = {
        (span.rollout, span.attempt, span.seq): float(value)
        for row, own in zip(rows, given, strict=True)
        for span, value in zip(row.spans, own, strict=True)
    }
    await store.put_state(run, values_key(step), [[*key, value] for key, value in sorted(found.items())])
    return with_values(groups, found)


def values_key(step: int) -> str:
    """The key of a run's state that has the head's values of a step: `[rollout, attempt, seq, value]` for each call."""
    return f"values/{step}"


async def all_rollouts(store: Store, run: str, *, split: str | None = None, step: int | None = None) -> list[Rollout]:
    """Every rollout of a run (all pages), in creation order. Those of all steps may be gigabytes: `each_rollout` keeps none."""
    return [rollout async for rollout in each_rollout(store, run, split=split, step=step)]


def of_groups(rollouts: Iterable[Rollout], groups: Sequence[str]) -> list[Rollout]:
    """Those of the rollouts that belong to the groups, in the order of the groups."""
    members = by_key(rollouts, attrgetter("group"))
    return [rollout for group in dict.fromkeys(groups) for rollout in members.get(group, ())]


OF_MODEL, OF_POLICY, NOT = "model:", "policy:", "!"
"""How a glob of `train_agents` begins that is matched with the requested model, one that is matched with the policy that
answered, and one that takes out what it matches."""


def is_trainable(caller: Caller, train_agents: Sequence[str], model: str = "", policy: str = POLICY) -> bool:
    """Whether a call belongs to the component of interest: a glob matches its path (`sql/writer`), its agent's name, as
    `model:gpt-*` the model that it asked for, or as `policy:writer` the policy that answered.

    Globs that begin with `!` take out what they match, of all calls where there are no other globs.
    """
    taken = [glob for glob in train_agents if not glob.startswith(NOT)]
    left_out = [glob[len(NOT) :] for glob in train_agents if glob.startswith(NOT)]
    return (not taken or any(_matches(caller, model, policy, glob) for glob in taken)) and not any(
        _matches(caller, model, policy, glob) for glob in left_out
    )


def without(policies: Iterable[str]) -> tuple[str, ...]:
    """Return the globs of `train_agents` that take out the calls of these policies."""
    return tuple(f"{NOT}{OF_POLICY}{name}" for name in policies)


def agents_of_step(epoch: Epoch, record: StepRecord) -> tuple[str, ...]:
    """The globs of the calls that a committed step trained: those of its epoch, without the policies that rested."""
    resting = record.context.get(RESTING)
    return epoch.train_agents + without(map(str, resting if isinstance(resting, (list, tuple)) else ()))


def of_interest(groups: Sequence[Group], train_agents: Sequence[str]) -> list[Group]:
    """Return the groups with the calls that these globs match as the component of interest. A masked rollout stays masked."""

    def again(member: Trajectory) -> Trajectory:
        flags = tuple(is_of_interest(call, train_agents) for call in member.transitions)
        return replace(member, of_interest=flags) if member.of_interest else replace(member, trainable=flags)

    return [Group(group.id, tuple(map(again, group.trajectories))) for group in groups]


def is_of_interest(call: Transition, train_agents: Sequence[str]) -> bool:
    """Whether a recorded call belongs to the component of interest (`is_trainable`): a call that is marked as untrained does
    not, whoever made it."""
    return not call.untrained and is_trainable(call.caller, train_agents, call.requested_model, call.policy)


def _matches(caller: Caller, model: str, policy: str, glob: str) -> bool:
    for kind, value in ((OF_MODEL, model), (OF_POLICY, policy)):
        if glob.startswith(kind):
            return fnmatchcase(value, glob[len(kind) :])
    return fnmatchcase(caller.name, glob) or fnmatchcase(caller.agent, glob)


async def load_groups(
    store: Store, rollouts: Sequence[Rollout], train_agents: Sequence[str], policy_fault: PolicyFault = "exclude"
) -> list[Group]:
    """The groups of succeeded rollouts, in the order their first rollout was created. Failed rollouts are absent, but for those
    that the policy failed, which are what `policy_fault` makes of them."""
    done = [known for rollout in rollouts if (known := scored(rollout, policy_fault)) is not None]
    attempts = [(rollout.id, rollout.attempt) for rollout in done]
    calls, ended = await store.transitions_of(attempts), await store.attempts_of(attempts)
    of_parents = await _calls_of_parents(store, done, dict(zip(attempts, calls, strict=True)))
    groups: dict[str, list[Trajectory]] = {rollout.group: [] for rollout in rollouts}
    for rollout, transitions, attempt in zip(done, calls, ended, strict=True):
        answered = tuple(call for call in transitions if call.status.answered)
        if rollout.status is Status.FAILED and not answered:
            continue
        masked = rollout.status is Status.FAILED and policy_fault == "mask"
        of_interest = tuple(is_of_interest(call, train_agents) for call in answered)
        groups[rollout.group].append(
            Trajectory(
                rollout,
                answered,
                (False,) * len(answered) if masked else of_interest,
                attempt.tool_events,
                attempt.step_rewards,
                refused=tuple(call for call in transitions if call.status is CallStatus.REFUSED),
                lost=tuple(
                    call for call in transitions if not call.status.answered and call.status is not CallStatus.REFUSED
                ),
                parent_calls=() if rollout.parent is None else of_parents.get(rollout.parent[:2], ()),
                of_interest=of_interest if masked else (),
            )
        )
    return [
        Group(name, tuple(sorted(members, key=lambda member: member.rollout.index))) for name, members in groups.items()
    ]


async def _calls_of_parents(
    store: Store, rollouts: Iterable[Rollout], known: Mapping[tuple[str, int], Sequence[Transition]]
) -> dict[tuple[str, int], Sequence[Transition]]:
    """All calls of the attempts that branches begin as, those that are in the store. The `known` ones are not read again."""
    keys = dict.fromkeys(rollout.parent[:2] for rollout in rollouts if rollout.parent is not None)
    there = [key for key in keys if key not in known and await store.get_rollout(key[0]) is not None]
    return {**known, **dict(zip(there, await store.transitions_of(there) if there else (), strict=True))}


def scored(rollout: Rollout, policy_fault: PolicyFault) -> Rollout | None:
    """The rollout with the reward that training gives it; None where it is in no group."""
    if rollout.status is Status.SUCCEEDED:
        return rollout
    if rollout.status is not Status.FAILED or rollout.fault is not Fault.POLICY or policy_fault == "exclude":
        return None
    return replace(rollout, reward=0.0 if policy_fault == "mask" else float(policy_fault))


def rollout_digest(trajectory: Trajectory) -> str:
    """SHA-256 (hex) of everything recorded about a rollout that training reads: ids, logprobs, masks, reward, versions,
    order."""
    rollout = trajectory.rollout
    digest = hashlib.sha256()
    digest_text(digest, rollout.id, rollout.group, rollout.task.id)
    digest.update(struct.pack("<qqqd", rollout.attempt, rollout.step, rollout.index, trajectory.reward))
    digest_text(digest, json.dumps(rollout.parent))
    for call, trainable in zip(trajectory.transitions, trajectory.trainable, strict=True):
        names = call.caller.agent, "/".join(call.caller.path)
        digest_text(digest, call.id, *names, call.status.value, call.finish_reason, call.untrained)
        digest.update(struct.pack("<qqd??", call.seq, call.choice, call.temperature, call.constrained, trainable))
        for run in call.versions:
            digest.update(struct.pack("<qq", run.start, run.version))
            digest_text(digest, run.policy)
        for values, kind in ((call.prompt_ids, "<i4"), (call.response_ids, "<i4"), (call.logprobs, "<f4")):
            digest.update(struct.pack("<q", len(values)))
            digest.update(np.asarray(values, dtype=kind).data)
        if trainable and (mask := mask_of(call)) is not None:  # a damaged mask of another call ends no step
            mask.update(digest)
    for event in trajectory.tool_events:
        digest_text(digest, event.name, event.status, event.call_id, event.response_id)
    for step_reward in trajectory.step_rewards:
        digest_text(digest, step_reward.name, step_reward.response_id)
        digest.update(struct.pack("<d", step_reward.value))
    return digest.hexdigest()


def batch_digest(batch: Batch) -> str:
    """SHA-256 (hex) of what the engine computes on: every array of the training rows in their order and, where the batch
    brings a loss of its own, that loss: its type and fields, the pairs of a `PreferenceLoss` among them."""
    digest = hashlib.sha256()
    for sample in batch.samples:
        digest.update(struct.pack("<qd", len(sample), sample.temperature))
        if sample.policy != POLICY:
            digest_text(digest, sample.policy)
        for values, kind in (
            (sample.ids, "<i4"),
            (sample.weights, "<f4"),
            (sample.advantages, "<f4"),
            (sample.logprobs, "<f4"),
            (sample.versions, "<i4"),
        ):
            digest.update(np.ascontiguousarray(values, dtype=kind).tobytes())
        if sample.mask is not None:
            sample.mask.update(digest)
        for span in sample.spans:
            digest_text(digest, span.rollout)
            digest.update(struct.pack("<qqqq", span.attempt, span.seq, span.start, span.stop))
            digest.update(struct.pack("<dd", span.value_target, span.value_weight))
    digest_loss(digest, batch)
    return digest.hexdigest()


def digest_loss(digest: hashlib._Hash, batch: Batch) -> None:
    """Add a batch's own loss to a digest, if it has one: its type, its fields, and the name and the source of a user's code."""
    if batch.loss is not None:
        loss = batch.loss.given if isinstance(batch.loss, GivenLoss) else batch.loss
        digest_text(digest, type(loss).__qualname__, *_fields(loss))


def _fields(loss: object) -> Iterator[str]:
    """What a loss was made with, as JSON, and what its correction was made with; of a function or an object of another class
    its name. Then the number of most probable tokens that it wants, the digest of the code, if it is a user's, and the defaults
    of its arguments. All of it is the same in every process. Values that a function finds outside of itself, also in its
    closure, are not in it, because they may change while it runs."""
    if dataclasses.is_dataclass(loss):
        for field in dataclasses.fields(loss):
            if field.init:
                yield f"{field.name}={json.dumps(getattr(loss, field.name), default=_in_json, skipkeys=True)}"
    else:
        yield name_of(loss)
    if isinstance(loss, partial):
        yield json.dumps([loss.args, loss.keywords], default=_in_json, skipkeys=True)
    if top := needs_top_logprobs(loss):
        yield f"needs_top_logprobs={top}"
    if code := code_digest(loss):
        yield code
        inner = loss.func if isinstance(loss, partial) else loss
        defaults = [getattr(inner, name, None) for name in ("__defaults__", "__kwdefaults__")]
        if any(defaults):
            yield json.dumps(defaults, default=_in_json, skipkeys=True)


def _in_json(value: object) -> object:
    if isinstance(value, Correction):
        return dataclasses.asdict(value)
    name = str(getattr(value, "__qualname__", type(value).__qualname__))
    return f"{name} {code}" if (code := code_digest(value)) else name


def record_step(
    run: str,
    step: int,
    groups: Sequence[Group],
    batch: Batch,
    digest: str = "",
    *,
    checkpoint: str,
    metrics: Mapping[str, float],
    context: Mapping[str, Json],
    extras: Mapping[str, bytes] | None = None,
) -> StepRecord:
    """The proof of a step: what was trained, in which order, and the digests an audit compares with. Its `digest` is the
    batch's, unless the loop that trained the step gives another one."""
    trajectories = {member.rollout.id: member for group in groups for member in group.trajectories}
    return StepRecord(
        run=run,
        step=step,
        policy_version=step,
        rollouts=tuple((rollout.id, rollout.attempt) for rollout in batch.used),
        digests=tuple(rollout_digest(trajectories[rollout.id]) for rollout in batch.used),
        digest=digest or batch_digest(batch),
        checkpoint=checkpoint,
        metrics=metrics,
        groups=tuple(group.id for group in groups),
        context=context,
        extras=extras or {},
    )


def count_drift(batch: Batch, calls: Sequence[Transition], seen: Mapping[tuple[str, int, int], str]) -> int:
    """How many trained tokens are not the ones the policy server sampled.

    `seen` is what the engine computed its loss on, `calls` what the gateway recorded from the policy server's answers.
    """
    recorded = {call.key: call for call in calls}
    return sum(
        span.stop - span.start
        for sample in batch.samples
        for span in sample.spans
        if (call := recorded.get((span.rollout, span.attempt, span.seq))) is None
        or seen.get(call.key) != transition_digest(call)
    )


def digest_text(digest: hashlib._Hash, *values: str) -> None:
    """Add texts to a digest, each with its length in bytes."""
    for value in values:
        data = value.encode()
        digest.update(struct.pack("<q", len(data)))
        digest.update(data)
