"""What became of each call of an attempt: the step that trained it or why none did, the earlier call that it tries again,
whether the agent went on with its answer, and its tool runs and step rewards.

The invariant: it is read from the store, without a model and without the algorithm, so a call counts as trained if the step's
record has its rollout and the call is one of those that are trained. An advantage of exactly 0 is not seen here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from lightning.errors import StoreError
from lightning.store.protocol import PRUNED, Store
from lightning.trainer.context import Epoch, epoch_at, read_epochs
from lightning.trainer.training_data import agents_of_step, is_of_interest, scored
from lightning.types import CallStatus, Rollout, Status, StepRecord, StepReward, ToolEvent, Transition, by_key
from lightning_branching.recorded import at_attempt
from lightning_harnesses.config import ACCEPTED, JUDGED, REJECTED
from lightning_harnesses.verdicts import verdicts
from lightning_record import exchanges
from lightning_record.exchanges import Parent, parents_of

UNTRAINED: Final = {
    "train": "no training step has looked at it",
    "branch": "branches that were made by a command are not trained on",
}
"""Why no step trained a rollout, by its split."""
HELD_OUT: Final = "held-out rollouts are never trained on"


@dataclass(frozen=True, slots=True)
class RolloutCall:
    """One call, or one choice of a call. `number` counts all of the attempt from 1. `untrained` says why no step trained it;
    it is empty if one did. `again` is the number of the call that this one tries again, `rejected_by` that of the call with
    which the agent rejected this one; 0 for none. `judged` is the kind of a call whose answer the program may throw away, and
    what became of the answer, as `compaction, accepted`; empty for any other call."""

    number: int
    transition: Transition
    untrained: str = ""
    again: int = 0
    rejected_by: int = 0
    judged: str = ""
    tool_events: tuple[ToolEvent, ...] = ()
    step_rewards: tuple[StepReward, ...] = ()


@dataclass(frozen=True, slots=True)
class RolloutCalls:
    """One attempt of a rollout, of which the store has `attempts`. `step` is the training step that looked at the rollout, None
    if there is none. `branched_at` is the number of the parent's call at which a branch begins, None if it is not stored.
    `tool_events` and `step_rewards` are those of no call. `empty` says why there is no call."""

    rollout: Rollout
    attempts: int
    step: int | None
    calls: tuple[RolloutCall, ...]
    branched_at: int | None = None
    tool_events: tuple[ToolEvent, ...] = ()
    step_rewards: tuple[StepReward, ...] = ()
    empty: str = ""

    @property
    def is_last(self) -> bool:
        """Whether it is the last attempt, whose outcome the store keeps and which alone is trained."""
        return self.rollout.attempt == self.attempts


async def read_calls(store: Store, rollout: Rollout, attempt: int | None = None) -> RolloutCalls:
    """Read an attempt of a rollout; None is the last one. Raises `DataError` if there is no such attempt, `StoreError` for rows
    that cannot be read."""
    newest, own = rollout.attempt, at_attempt(rollout, attempt)
    calls = await store.transitions(own.id, own.attempt)
    (ended,) = await store.attempts_of([(own.id, own.attempt)])
    (parent,) = await parents_of(store, [own])
    run = await store.get_run(own.run)
    epochs = [] if run is None else await read_epochs(store, run)
    record = await record_of(store, own, epochs)
    again, rejected, judged = tries_again(calls, requests_of(calls, parent)), _rejected(calls), _judged(calls)
    tools = by_key(ended.tool_events, lambda event: call_behind(event, calls))
    rewards = by_key(ended.step_rewards, lambda reward: call_behind(reward, calls))
    lines = [
        RolloutCall(
            number,
            call,
            why_untrained(call, own, record, epoch_at(epochs, record.step) if record else None, newest=newest),
            again.get(number, 0),
            rejected.get(call.id, 0),
            judged.get(call.id, ""),
            tuple(tools.get(number, ())),
            tuple(rewards.get(number, ())),
        )
        for number, call in enumerate(calls, 1)
    ]
    at = None
    if own.parent is not None:
        keys = [call.key for call in await store.transitions(*own.parent[:2])]
        at = keys.index(own.parent) + 1 if own.parent in keys else None
    step = record.step if record is not None else None
    return RolloutCalls(
        own,
        newest,
        step,
        tuple(lines),
        at,
        tuple(tools.get(0, ())),
        tuple(rewards.get(0, ())),
        "" if calls else await why_no_calls(store, own),
    )


async def why_no_calls(store: Store, rollout: Rollout) -> str:
    """Say why a rollout has no stored call."""
    if not rollout.attempt:
        return "it has not begun yet"
    if not rollout.status.ended:
        return "it has made no call yet"
    if await store.get_state(rollout.run, PRUNED):
        return "no call of it is stored: it made none, or `lightning db prune` removed them (it did in this run)"
    return "it made no model call"


async def record_of(store: Store, rollout: Rollout, epochs: Sequence[Epoch]) -> StepRecord | None:
    """Return the committed step that looked at a rollout's group; None if none has."""
    if rollout.trained_at_step is not None:
        found = await store.steps(rollout.run, after=rollout.trained_at_step - 1, limit=1)
        return found[0] if found and found[0].step == rollout.trained_at_step else None
    most = max((epoch.max_staleness or 0 for epoch in epochs), default=0)
    for record in await store.steps(rollout.run, after=rollout.step - 1, limit=most + 1):
        if rollout.group in record.groups:
            return record
    return None


def why_untrained(
    call: Transition, rollout: Rollout, record: StepRecord | None, epoch: Epoch | None, *, newest: int
) -> str:
    """Return why no step trained a call of an attempt of a rollout, as far as the step's `record` says; empty if it was in the
    step's rows. `epoch` are the settings of that step, `newest` is the rollout's last attempt."""
    if call.untrained:
        return f"it is recorded and not trained: {call.untrained}"
    if not call.status.answered or not len(call.response_ids):
        return f"it gave nothing to train on: {call.status}{f', {call.finish_reason}' if call.finish_reason else ''}"
    if call.status is CallStatus.MEDIA:
        return "its prompt has an image, audio, video or a file"
    if rollout.attempt != newest:
        return f"attempt {newest} took its place"
    if not rollout.status.ended:
        return f"its rollout has not ended: {rollout.status}"
    if record is None or epoch is None:
        return UNTRAINED.get(rollout.split, HELD_OUT)
    if scored(rollout, epoch.policy_fault) is None:
        return f"its rollout is in no group: {rollout.status}{f', fault: {rollout.fault}' if rollout.fault else ''}"
    if not is_of_interest(call, epoch.train_agents):
        return f"its agent is not trained in step {record.step}"
    if not is_of_interest(call, agents_of_step(epoch, record)):
        return f"its policy {call.policy} rested in step {record.step}"
    if rollout.status is Status.FAILED and epoch.policy_fault == "mask":
        return "its rollout is masked: the policy failed it (trainer.policy_fault)"
    if (rollout.id, rollout.attempt) not in record.rollouts:
        return f"step {record.step} left its rollout out{_reasons(record.metrics)}"
    return ""


def _reasons(metrics: Mapping[str, float]) -> str:
    """Format for which reasons a step left groups and rollouts out; it does not say which of them."""
    kinds = ("skipped/", "dropped/")
    told = [f"{value:.0f} {name.partition('/')[2]}" for name, value in metrics.items() if name.startswith(kinds)]
    return f" (left out there: {', '.join(told)})" if told else ""


def requests_of(calls: Sequence[Transition], parent: Parent | None) -> list[bytes]:
    """Return a digest of each call's recorded request, empty for a call without one. They are read only if a call that reached
    the policy server has no prompt, because it failed there: else prompts tell calls that are tried again."""
    if all(len(call.prompt_ids) or call.status is CallStatus.REFUSED for call in calls):
        return []
    with suppress(StoreError):  # the pages and commands that show texts say which cannot be read
        return [
            hashlib.blake2b(exchanges.canonical([each.path, each.request]), digest_size=16).digest()
            if each is not None and each.request is not None
            else b""
            for each in exchanges.read(calls, parent)
        ]
    return []


def tries_again(calls: Sequence[Transition], requests: Sequence[bytes] = ()) -> dict[int, int]:
    """Return, by number, the number of the last call before each call that had its agent and either its prompt, token for
    token, or its request (`requests_of`), which a call that failed has alone."""
    found, last = {}, dict[tuple[str, str, bytes], tuple[int, str]]()
    for number, call in enumerate(calls, 1):
        keys = list(_keys(call, requests[number - 1] if requests else b""))
        before = max((last[key] for key in keys if key in last), default=(0, call.id))
        if before[1] != call.id:
            found[number] = before[0]
        if not call.choice:
            last.update(dict.fromkeys(keys, (number, call.id)))
    return found


def _keys(call: Transition, request: bytes) -> Iterator[tuple[str, str, bytes]]:
    if len(call.prompt_ids):
        yield call.caller.name, "prompt", hashlib.blake2b(call.prompt_ids, digest_size=16).digest()
    if request:
        yield call.caller.name, "request", request


def _rejected(calls: Sequence[Transition]) -> dict[str, int]:
    """Return, by the id of a rejected call, the number of the call whose header rejected it."""
    return {name: number for number, call in enumerate(calls, 1) for name in call.rejects}


def _judged(calls: Sequence[Transition]) -> dict[str, str]:
    """Return the kind of each call whose answer the program may throw away, and what became of the answer where that is known,
    by the call's id."""
    kinds = {call.id: call.extras[JUDGED].decode() for call in calls if JUDGED in call.extras}
    known = verdicts(calls, kinds) if kinds else {}
    said = {True: ACCEPTED, False: REJECTED, None: ", not known what became of it"}
    return {name: f"{kind}{said[known.get(name)]}" for name, kind in kinds.items()}


def call_behind(what: ToolEvent | StepReward, calls: Sequence[Transition]) -> int:
    """Return the number of the call that asked for a tool run, or that a step reward is for; 0 if the record does not say."""
    numbered = list(enumerate(calls, 1))
    if isinstance(what, ToolEvent) and what.call_id:
        asked = next((number for number, call in numbered if what.call_id in call.tool_calls), 0)
        if asked:
            return asked
    return next((number for number, call in numbered if what.response_id and call.id == what.response_id), 0)
