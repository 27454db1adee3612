"""What became of each call of an attempt: the step that trained it or why none did, the earlier call that it tries again,
whether the agent went on with its answer, and its tool runs and step rewards.

The invariant: it is read from the store, without a model and without the algorithm, so a call counts as trained if the step's
record has its rollout and the call is one of those that are trained. An advantage of exactly 0 is not seen here. Calls have
the numbers that `lightning branch --at` gives them: those of a branch begin with 1 at its own first call, and a replay, which
repeats the parent's calls too, counts these as well. A place counts choices and unnumbered calls, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from lightning.errors import DataError, StoreError
from lightning.safe_text import counted
from lightning.store.protocol import PRUNED, Store
from lightning.trainer.context import Epoch, epoch_at, read_epochs
from lightning.trainer.metrics import REASONS
from lightning.trainer.training_data import agents_of_step, is_of_interest, scored
from lightning.types import POLICY, CallStatus, Rollout, Status, StepRecord, StepReward, ToolEvent, Transition, by_key
from lightning_branching.recorded import at_attempt, numbers_of
from lightning_harnesses.config import ACCEPTED, JUDGED, REJECTED
from lightning_harnesses.verdicts import verdicts
from lightning_record import exchanges
from lightning_record.exchanges import Parent, parents_of

NOT_LOOKED_AT: Final = {
    "train": "no training step has looked at it",
    "branch": "branches that were made by a command are not trained on",
}
"""Why no step trained a rollout, by its split."""
HELD_OUT: Final = "held-out rollouts are never trained on"
UNITS: Final = {"skipped": "group", "dropped": "rollout"}
"""What a step's metrics count by the reason for which it was left out."""
NOT_OF_ROLLOUTS: Final = frozenset({"dropped/media", "dropped/idle"})
"""Of these the first counts calls, the second rollouts without a call."""


@dataclass(frozen=True, slots=True)
class CallNotes:
    """How a call stands to other calls. `again` is the place, from 1, of the call that this one tries again, `rejected_by` that
    of the call with which the agent rejected this one; 0 for none. `judged` is the kind of a call whose answer the program may
    throw away, and what became of the answer, as `compaction, accepted`; empty for any other call."""

    again: int = 0
    rejected_by: int = 0
    judged: str = ""

    def said(self, untrained: str, name: Callable[[int], str] = "call {}".format) -> str:
        """Format the notes on a call whose mark is `untrained`. `name` names the call at a place."""
        tried = f"tries {name(self.again)} again" if self.again else ""
        rejected = f"rejected by {name(self.rejected_by)}" if self.rejected_by else ""
        return "; ".join(filter(None, [tried, rejected, self.judged if self.judged != untrained else ""]))


NO_NOTES: Final = CallNotes()


@dataclass(frozen=True, slots=True)
class RolloutCall:
    """One call, or one choice of a call. `number` is that of the call (`numbers_of`), 0 for one without. `trained_in` are the
    steps that trained it; if there are none, `untrained` says why."""

    number: int
    transition: Transition
    trained_in: tuple[int, ...] = ()
    untrained: str = ""
    notes: CallNotes = NO_NOTES
    tool_events: tuple[ToolEvent, ...] = ()
    step_rewards: tuple[StepReward, ...] = ()


@dataclass(frozen=True, slots=True)
class RolloutCalls:
    """One attempt of a rollout, of which the store has `attempts`. `steps` are the training steps that looked at it; none if it
    has not ended or another took its place. `branched_at` is the number of the parent's call at which a branch begins, None if
    it is not stored. `tool_events` and `step_rewards` are those of no call. `empty` says why there is no call."""

    rollout: Rollout
    attempts: int
    steps: tuple[int, ...]
    calls: tuple[RolloutCall, ...]
    branched_at: int | None = None
    tool_events: tuple[ToolEvent, ...] = ()
    step_rewards: tuple[StepReward, ...] = ()
    empty: str = ""

    @property
    def is_last(self) -> bool:
        """Whether it is the last attempt, whose outcome the store keeps and which alone is trained."""
        return self.rollout.attempt == self.attempts

    @property
    def is_over(self) -> bool:
        """Whether the attempt has ended; an earlier one has, even if the rollout still runs."""
        return not self.is_last or self.rollout.status.ended

    def name(self, place: int) -> str:
        """Return how people name the call at a place."""
        return f"call {number}" if (number := self.calls[place - 1].number) else "a call without a record"


async def read_calls(store: Store, rollout: Rollout, attempt: int | None = None) -> RolloutCalls:
    """Read an attempt of a rollout; None is the last one. Raises `DataError` if there is no such attempt, or the rollout's run
    is not there, `StoreError` for rows that cannot be read."""
    newest, own = rollout.attempt, at_attempt(rollout, attempt)
    run = await store.get_run(own.run)
    if run is None:
        raise DataError(f"the store does not have the run {own.run} of the rollout {own.id}")
    calls = await store.transitions(own.id, own.attempt)
    (ended,) = await store.attempts_of([(own.id, own.attempt)])
    (parent,) = await parents_of(store, [own])
    is_over = own.attempt == newest and own.status.ended
    steps = await steps_of(store, own, await read_epochs(store, run)) if is_over else []
    tools = by_key(ended.tool_events, lambda event: call_behind(event, calls))
    rewards = by_key(ended.step_rewards, lambda reward: call_behind(reward, calls))
    known = zip(calls, numbers_of(calls), notes_of(calls, parent), strict=True)
    lines = []
    for place, (call, number, notes) in enumerate(known, 1):
        told = why_untrained(call, own, steps, newest=newest)
        trained = tuple(step for step, why in told.items() if not why)
        why = "" if trained else "; ".join(dict.fromkeys(told.values()))
        events, given = tuple(tools.get(place, ())), tuple(rewards.get(place, ()))
        lines.append(RolloutCall(number, call, trained, why, notes, events, given))
    return RolloutCalls(
        own,
        newest,
        tuple(record.step for record, _ in steps),
        tuple(lines),
        await _branched_at(store, own),
        tuple(tools.get(0, ())),
        tuple(rewards.get(0, ())),
        "" if calls else await why_no_calls(store, own),
    )


async def _branched_at(store: Store, rollout: Rollout) -> int | None:
    """Return the number of the parent's call at which a branch begins; None if it is not stored, or the rollout no branch."""
    if rollout.parent is None:
        return None
    calls = await store.transitions(*rollout.parent[:2])
    known = zip(calls, numbers_of(calls), strict=True)
    return next((number for call, number in known if call.key == rollout.parent), None)


async def why_no_calls(store: Store, rollout: Rollout) -> str:
    """Say why a rollout has no stored call."""
    if not rollout.attempt:
        return "it has not begun yet"
    if not rollout.status.ended:
        return "it has made no call yet"
    if await store.get_state(rollout.run, PRUNED):
        return "no call of it is stored: it made none, or `lightning db prune` removed them (it did in this run)"
    return "it made no model call"


async def steps_of(store: Store, rollout: Rollout, epochs: Sequence[Epoch]) -> list[tuple[StepRecord, Epoch]]:
    """Return the committed steps that looked at a rollout's group, in order, each with its settings. They are several if a step
    declares a reuse: of a replay buffer, or for policies that take turns."""
    most = max((epoch.max_staleness or 0 for epoch in epochs), default=0)
    near = await store.steps(rollout.run, after=rollout.step - 1, limit=most + 1)
    found = {record.step: record for record in near if rollout.group in record.groups}
    first = rollout.trained_at_step
    if first is not None and first not in found:  # training on a record has no bound of the staleness
        found |= {
            each.step: each for each in await store.steps(rollout.run, after=first - 1, limit=1) if each.step == first
        }
    return [(record, epoch_at(epochs, step)) for step, record in sorted(found.items())]


def why_untrained(
    call: Transition, rollout: Rollout, steps: Sequence[tuple[StepRecord, Epoch]], *, newest: int
) -> dict[int, str]:
    """Return why each of the `steps` (`steps_of`) did not train a call of an attempt of a rollout, by the step's number, as far
    as its record says; empty for a step that has the call in its rows. What holds for every step is at 0 alone. `newest` is the
    rollout's last attempt."""
    if why := _why_in_none(call, rollout, newest):
        return {0: why}
    if not steps:
        return {0: NOT_LOOKED_AT.get(rollout.split, HELD_OUT)}
    return {record.step: _why_not_in(record, epoch, call, rollout) for record, epoch in steps}


def _why_in_none(call: Transition, rollout: Rollout, newest: int) -> str:
    """Return why a call is trained in no step, whatever the step; empty if it may be."""
    if call.untrained:
        return f"it is recorded and not trained: {call.untrained}"
    if not call.status.answered or not len(call.response_ids):
        return f"it gave nothing to train on: {call.status}{f', {call.finish_reason}' if call.finish_reason else ''}"
    if call.status is CallStatus.MEDIA:
        return "its prompt has an image, audio, video or a file"
    if rollout.attempt != newest:
        return f"attempt {newest} took its place"
    return "" if rollout.status.ended else f"its rollout has not ended: {rollout.status}"


def _why_not_in(record: StepRecord, epoch: Epoch, call: Transition, rollout: Rollout) -> str:
    """Return why a step with these settings did not train a call; empty if the step has it in its rows."""
    if scored(rollout, epoch.policy_fault) is None:
        return f"its rollout is in no group: {rollout.status}{said_fault(rollout)}"
    if not is_of_interest(call, epoch.train_agents):
        return f"its agent is not trained in step {record.step}"
    if not is_of_interest(call, agents_of_step(epoch, record)):
        return f"its policy{'' if call.policy == POLICY else f' {call.policy}'} rested in step {record.step}"
    if rollout.status is Status.FAILED and epoch.policy_fault == "mask":
        return "its rollout is masked: the policy failed it (trainer.policy_fault)"
    if (rollout.id, rollout.attempt) not in record.rollouts:
        return f"step {record.step} left its rollout out{_reasons(record.metrics)}"
    return ""


def said_fault(rollout: Rollout) -> str:
    """Format whose fault the end of a rollout was; empty without one, and where the status says it already."""
    return f", fault: {rollout.fault}" if rollout.fault and str(rollout.fault) != str(rollout.status) else ""


def _reasons(metrics: Mapping[str, float]) -> str:
    """Format for which reasons a step left out groups, and rollouts with calls; it does not say which of them."""
    told = []
    for name, value in metrics.items():
        kind, _, why = name.partition("/")
        if kind in UNITS and name not in NOT_OF_ROLLOUTS:
            told.append(f"{counted(int(value), UNITS[kind])}: {REASONS.get(why, why.replace('_', ' '))}")
    return f" (it left out {'; '.join(told)})" if told else ""


def notes_of(calls: Sequence[Transition], parent: Parent | None) -> list[CallNotes]:
    """Return how each call of an attempt stands to the others; a branch also needs its `parent` (`parents_of`)."""
    again = tries_again(calls, requests_of(calls, parent))
    rejected = {name: place for place, call in enumerate(calls, 1) for name in call.rejects}
    judged = _judged(calls)
    return [
        CallNotes(again.get(place, 0), rejected.get(call.id, 0), judged.get(call.id, ""))
        for place, call in enumerate(calls, 1)
    ]


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
    """Return, by place, the place of the last call that ended before each call began and that had its agent and either its
    prompt, token for token, or its request (`requests_of`), which a call that failed has alone. Equal calls beside each other
    are no retries; neither is a call of which it is not known whether it came after."""
    found: dict[int, int] = {}
    earlier: dict[tuple[str, str, bytes], list[int]] = {}
    for place, call in enumerate(calls, 1):
        keys = list(_keys(call, requests[place - 1] if requests else b""))
        if last := max((_ended_before(call, earlier.get(key, ()), calls) for key in keys), default=0):
            found[place] = last
        if not call.choice:
            for key in keys:
                earlier.setdefault(key, []).append(place)
    return found


def _ended_before(call: Transition, places: Sequence[int], calls: Sequence[Transition]) -> int:
    """Return the last of these places whose call ended before another began; 0 if there is none."""
    known = ((place, calls[place - 1]) for place in reversed(places))
    ended = (place for place, each in known if each.id != call.id and 0 < each.ended_at <= call.started_at)
    return next(ended, 0)


def _keys(call: Transition, request: bytes) -> Iterator[tuple[str, str, bytes]]:
    if len(call.prompt_ids):
        yield call.caller.name, "prompt", hashlib.blake2b(call.prompt_ids, digest_size=16).digest()
    if request:
        yield call.caller.name, "request", request


def _judged(calls: Sequence[Transition]) -> dict[str, str]:
    """Return the kind of each call whose answer the program may throw away, and what became of the answer where that is known,
    by the call's id."""
    kinds = {call.id: call.extras[JUDGED].decode() for call in calls if JUDGED in call.extras}
    known = verdicts(calls, kinds) if kinds else {}
    said = {True: ACCEPTED, False: REJECTED, None: ", not known what became of it"}
    return {name: f"{kind}{said[known.get(name)]}" for name, kind in kinds.items()}


def call_behind(what: ToolEvent | StepReward, calls: Sequence[Transition]) -> int:
    """Return the place of the call that asked for a tool run, or that a step reward is for; 0 if the record does not say."""
    numbered = list(enumerate(calls, 1))
    if isinstance(what, ToolEvent) and what.call_id:
        asked = next((number for number, call in numbered if what.call_id in call.tool_calls), 0)
        if asked:
            return asked
    return next((number for number, call in numbered if what.response_id and call.id == what.response_id), 0)
