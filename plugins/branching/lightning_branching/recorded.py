"""The record of a rollout that is run again: its calls, each given once; the part of a parent's record that a branch repeats;
the changes that a branch declares; and the check that a branch began as its parent did.

The invariant: a rollout whose record is not whole is refused with the reason, never replayed in part. Calls are in the order in
which the agent made them. The calls that a branch inherits come before its own, with the ids and answers that it got.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from lightning.batch import begins_at, is_prefix
from lightning.errors import DataError
from lightning.safe_text import counted
from lightning.store.protocol import Store
from lightning.trainer.plan import TRAIN
from lightning.types import CallStatus, Rollout, StepReward, ToolEvent, Transition, by_key
from lightning_record import exchanges
from lightning_record.exchanges import Exchange, Parent, parents_of

VOID: Final = "This branch is void:"
"""The beginning of the error of a void branch."""
NEVER_BRANCHED: Final = (
    f"{VOID} the agent ended without an answer to the call at which it branches. It has to run as it did: give it the time and "
    "random numbers with its task"
)
NOT_RECORDED: Final = "for something that is not in the record"
OTHER_TOKENS: Final = "has other tokens than were recorded"
NOT_ASKED: Final = "was not asked for again"
"""Parts of the errors of void branches, one for each reason."""
VOID_REASONS: Final = (
    (NEVER_BRANCHED, "never_branched"),
    (OTHER_TOKENS, "other_tokens"),
    (NOT_ASKED, "not_asked_again"),
    (NOT_RECORDED, "other_request"),
)
"""What is in the error of a void branch, and the name under which its reason is counted."""
CHANGES: Final = "branch"
"""The key of a run's configuration for the changes of its branches: `{"edit": text, "prompts": true}`. `{"live": version}`
there says that the policy of the parent's run answers, as long as it has that version."""
EDIT_TAKEN: Final = "edit_taken"
"""The prefix of the keys in a run's state that say that the agent of a branch got its edited answer."""


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One model call. `number` is its number in the attempt (`numbers_of`); with the calls that a branch inherited it counts
    them all."""

    number: int
    transition: Transition
    exchange: Exchange

    @property
    def caller(self) -> str:
        """The path of the agent that made the call."""
        return self.transition.caller.name

    @property
    def key(self) -> tuple[str, bytes]:
        """The key by which a request is looked up: the API's path, and the canonical JSON of the body."""
        body = self.exchange.request
        return self.exchange.path, exchanges.canonical(body) if isinstance(body, dict) else b""


@dataclass(frozen=True, slots=True)
class RecordedRollout:
    """The record of one attempt of a rollout. `refusals` are calls that were refused before their request was recorded.
    `has_outcome` says that the outcome in `rollout` is that of this attempt; outcomes of earlier attempts are not kept."""

    rollout: Rollout
    calls: tuple[RecordedCall, ...]
    refusals: tuple[Transition, ...]
    tool_events: tuple[ToolEvent, ...]
    step_rewards: tuple[StepReward, ...] = ()
    has_outcome: bool = True


def at_attempt(rollout: Rollout, attempt: int | None) -> Rollout:
    """Return the rollout with its `attempt` set; None leaves the last one. Raises `DataError` if there was no such attempt."""
    if attempt is None:
        return rollout
    if not 0 < attempt <= rollout.attempt:
        made = counted(rollout.attempt, "attempt")
        raise DataError(f"the rollout {rollout.id} has {made}, so there is no attempt {attempt}")
    return replace(rollout, attempt=attempt)


async def read_rollout(
    store: Store, rollout: str, attempt: int | None = None, *, with_tools: bool = True, may_be_empty: bool = False
) -> RecordedRollout:
    """Read the record of a rollout from a store; for a branch, only its own calls.

    `attempt` None means the current attempt. `with_tools` also requires that the runs of tools can be answered from the record;
    `may_be_empty` allows a rollout without calls. Raises `DataError` for a rollout that does not exist or cannot be replayed,
    `ParentGoneError` for a branch whose parent was removed or made again.
    """
    found = await store.get_rollout(rollout)
    if found is None:
        raise DataError(f"there is no rollout {rollout!r} in this store")
    own = at_attempt(found, attempt)
    number = own.attempt
    transitions = await store.transitions(rollout, number)
    (ended,) = await store.attempts_of([(rollout, number)])
    (parent,) = await parents_of(store, [found])
    made = recorded_rollout(
        own,
        transitions,
        ended.tool_events,
        ended.step_rewards,
        parent=parent,
        with_tools=with_tools,
        may_be_empty=may_be_empty,
    )
    return made if number == found.attempt else replace(made, has_outcome=False)


def recorded_rollout(
    rollout: Rollout,
    transitions: Sequence[Transition],
    tool_events: Sequence[ToolEvent] = (),
    step_rewards: Sequence[StepReward] = (),
    *,
    parent: Parent | None = None,
    with_tools: bool = True,
    may_be_empty: bool = False,
) -> RecordedRollout:
    """Make the record of an attempt from its rows; a branch also needs the rows of its `parent`. Raises `DataError` for an
    attempt that cannot be replayed, `StoreError` for rows that cannot be read."""
    if not transitions and not may_be_empty:
        raise DataError(
            f"no call of the rollout {rollout.id} is stored: it made none, or `lightning db prune` removed them"
        )
    if why := exchanges.why_not_replayable(transitions, tool_events if with_tools else ()):
        raise DataError(f"the rollout {rollout.id} cannot be replayed: {why}")
    calls: list[RecordedCall] = []
    refusals = []
    read = exchanges.read(transitions, parent)
    for transition, number, exchange in zip(transitions, numbers_of(transitions), read, strict=True):
        if transition.choice:
            continue
        if exchange is not None:
            calls.append(RecordedCall(number, transition, exchange))
        elif transition.status is CallStatus.REFUSED:
            refusals.append(transition)
    return RecordedRollout(rollout, tuple(calls), tuple(refusals), tuple(tool_events), tuple(step_rewards))


def numbers_of(calls: Sequence[Transition]) -> list[int]:
    """Return the number by which people name each call of an attempt, from 1 in the order in which the calls began. The choices
    of a call share its number. A call without a recorded exchange, such as one that was refused before its request was read,
    has none (0), unless no call of the attempt has an exchange."""
    recorded = any(exchanges.packed_in(call) is not None for call in calls)
    found: list[int] = []
    of_id: dict[str, int] = {}
    last = 0
    for call in calls:
        if not call.choice:
            has_one = not recorded or exchanges.packed_in(call) is not None
            last += has_one
            of_id[call.id] = last if has_one else 0
        found.append(of_id.get(call.id, 0))
    return found


def version_of(call: Transition, rollout: Rollout) -> int:
    """Return the version of the policy that answered a call; if it is unknown, the version that the rollout was planned for."""
    return call.versions[0].version if call.versions else max(0, rollout.step - (rollout.split == TRAIN))


@dataclass(frozen=True, slots=True)
class Prefix:
    """The part of a rollout's record that its branches at the call `at` repeat. `answered` are the calls that were answered
    before `at` was sent; they are answered from the record. `beside` are all other calls, which are sampled anew; those that
    do not depend on the answer to `at` may come before it. `tool_events` are the runs of tools before `at`."""

    answered: tuple[RecordedCall, ...]
    at: RecordedCall
    beside: tuple[RecordedCall, ...]
    tool_events: tuple[ToolEvent, ...]


def prefix_of(recorded: RecordedRollout, seq: int) -> Prefix:
    """Return the part of the record that branches at the call with this `seq` repeat. Raises `DataError` if there is no such
    answered call, or if an earlier call has no recorded answer."""
    name = recorded.rollout.id
    at = next((call for call in recorded.calls if call.transition.seq == seq), None)
    if at is None or not at.transition.status.answered:
        count = len(recorded.calls)
        raise DataError(
            f"the rollout {name} has no answered call {seq}: its calls are 1 to {count}, counted as they began"
        )
    if recorded.rollout.parent is not None:
        parent, _, _ = recorded.rollout.parent
        raise DataError(f"the rollout {name} is a branch of {parent}: branch that one")
    sent = at.transition.started_at
    answered = tuple(call for call in recorded.calls if is_prefix(call.transition, at.transition))
    if broken := next((call for call in answered if not call.exchange.status), None):
        raise DataError(
            f"the rollout {name} cannot branch at call {at.number}: call {broken.number} broke off, and its answer is not "
            "kept"
        )
    if refused := next((call for call in recorded.refusals if call.started_at <= sent), None):
        raise DataError(
            f"the rollout {name} cannot branch at call {at.number}: a call before it was refused ({refused.finish_reason}), "
            "and its request is not kept"
        )
    beside = tuple(call for call in recorded.calls if call is not at and call not in answered)
    ids = {call.transition.id for call in answered}
    # A tool's clock may be another machine's: the id of the call that asked for its run says more.
    events = (
        event for event in recorded.tool_events if (event.response_id in ids if event.response_id else event.at <= sent)
    )
    return Prefix(answered, at, beside, tuple(events))


@dataclass(frozen=True, slots=True)
class MeantChanges:
    """The changes from its parent that a branch declares: an `edit` of the answer to the branching call, and other prompts.
    `live` is the version with which the policy of the parent's run must answer; None if a vLLM of the branches' own answers."""

    edit: str | None = None
    prompts: bool = False
    live: int | None = None


async def meant_changes(store: Store, rollout: Rollout) -> MeantChanges:
    """Return the changes that the run of a branch declares."""
    run = await store.get_run(rollout.run)
    said = run.config.get(CHANGES) if run is not None else None
    if not isinstance(said, Mapping):
        return MeantChanges()
    edit, live = said.get("edit"), said.get("live")
    return MeantChanges(
        None if edit is None else str(edit), bool(said.get("prompts")), live if isinstance(live, int) else None
    )


async def why_no_branch(store: Store, rollout: Rollout, calls: Sequence[Transition]) -> str:
    """Return the reason why a branch is void if its calls do not show that it branched; empty if they do. A branch that got its
    edited answer, or one with other prompts and any answered call, need not have made its parent's call."""
    assert rollout.parent is not None, "asked of branches"
    if await store.get_state(rollout.run, edit_key(rollout.id, rollout.attempt)) is True:
        return ""
    if (await meant_changes(store, rollout)).prompts and any(call.status.answered for call in calls):
        return ""
    parent, attempt, seq = rollout.parent
    at = next((call for call in await store.transitions(parent, attempt) if call.seq == seq), None)
    return "" if at is not None and begins_at(calls, at) else NEVER_BRANCHED


def is_void(rollout: Rollout) -> bool:
    """Whether an ended rollout is a void branch: one that did not begin as its parent did."""
    return rollout.parent is not None and rollout.error.startswith(VOID)


def void_reason(rollout: Rollout) -> str:
    """Return the name of the reason why a rollout is a void branch, for counting."""
    return next((name for said, name in VOID_REASONS if said in rollout.error), "no_record")


def edit_key(rollout: str, attempt: int) -> str:
    """Return the key in the state of a branch's run which says that the agent got the edited answer."""
    return f"{EDIT_TAKEN}/{rollout}/{attempt}"


class RecordedCalls:
    """The recorded calls that were not given yet. Each is given once; calls with equal requests are given in their order."""

    def __init__(self, calls: Iterable[RecordedCall]) -> None:
        self._left = by_key(calls, lambda call: call.key)

    def take(self, caller: str, path: str, request: bytes) -> RecordedCall | None:
        """Remove and return the recorded call with this request: that of the same caller if there is one, else the first; None
        if there is none."""
        same = self._left.get((path, request))
        if not same:
            return None
        found = next((call for call in same if call.caller == caller), same[0])
        same.remove(found)
        if not same:
            del self._left[path, request]
        return found

    @property
    def left(self) -> list[RecordedCall]:
        """The calls that were not given yet, in their order."""
        return sorted((call for calls in self._left.values() for call in calls), key=lambda call: call.number)


async def read_whole(
    store: Store, rollout: str, attempt: int | None = None, *, with_tools: bool = True
) -> RecordedRollout:
    """Read the record of a rollout as `read_rollout` does; for a branch, with the calls that it inherited. Its tool events
    already include the runs that were answered from the record. Raises `DataError` for a rollout that cannot be replayed, and
    for a branch whose parent cannot."""
    found = await store.get_rollout(rollout)
    if found is None or found.parent is None:
        return await read_rollout(store, rollout, attempt, with_tools=with_tools)
    own = await read_rollout(store, rollout, attempt, with_tools=with_tools, may_be_empty=True)
    parent, parents_attempt, seq = found.parent
    prefix = prefix_of(await read_rollout(store, parent, parents_attempt, with_tools=False), seq)
    calls: list[RecordedCall] = list(prefix.answered)
    if (edit := (await meant_changes(store, found)).edit) is not None:
        calls.append(edited(prefix.at, edit))
    calls += own.calls
    return replace(own, calls=tuple(replace(call, number=number) for number, call in enumerate(calls, 1)))


def live_tools(recorded: RecordedRollout, prefix: Prefix) -> list[str]:
    """Return the names of the tools that run again in a branch with this prefix: tools of frameworks, and all tools that ran
    after the branching call was sent."""
    answered = {id(event) for event in prefix.tool_events if not event.call_id}
    return sorted({event.name for event in recorded.tool_events if id(event) not in answered and not event.kind})


def edited(call: RecordedCall, text: str) -> RecordedCall:
    """Return the call as if the model had answered with this text and called no tool. Raises `DataError` for a call without an
    answer."""
    path, reply = call.exchange.path, call.exchange.reply
    if not isinstance(reply, dict):
        raise DataError(f"call {call.number} has no answer that could be edited")
    whole: dict[str, Any] = dict(reply)
    if path == "/messages":
        whole |= {"content": [{"type": "text", "text": text}], "stop_reason": "end_turn"}
    elif path == "/responses":
        part = {"type": "output_text", "text": text, "annotations": []}
        item = {"type": "message", "id": f"msg_{whole.get('id', '')}", "role": "assistant", "status": "completed"}
        whole |= {"output": [{**item, "content": [part]}]}
    else:
        chat = path == "/chat/completions"
        said: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        kept = {"index": 0, "finish_reason": "stop", "logprobs": None}
        whole |= {"choices": [{**kept, **said}]}
    return replace(call, exchange=replace(call.exchange, reply=whole))
